"""The stream to the scheduler: every request of this service over one connection that may break and come back.

What a new connection needs to go on is kept per request: its TokenRequest and the tokens received since.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from pagewire.rpc import RpcError
from pagewire.services.tokenizer import stats
from pagewire.streams import Link
from pagewire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

logger = logging.getLogger(__name__)

# Tokens per resubmission message; far below the limit on a message's size.
_MAX_TOKENS_PER_MESSAGE = 1_000_000


class TokenListener(Protocol):
    """Who made a request and hears of its tokens. Called from the stream's task."""

    def on_tokens(
        self,
        token_ids: Sequence[int],
        finish_reason: common_pb2.FinishReason,
        cached_tokens: int,
        stop_token_id: int | None,
        logprobs: common_pb2.Logprobs | None,
    ) -> None:
        """New tokens, possibly none. Nothing follows a set finish_reason."""

    def on_error(self, error: RpcError) -> None:
        """The request failed. Nothing follows."""


@dataclass(slots=True)
class _Live:
    request: scheduler_pb2.TokenRequest
    listener: TokenListener
    # Since the request was last sent.
    received: list[int] = field(default_factory=list)


class SchedulerLink:
    """Submits requests and hands out their tokens; `run()` keeps the stream up."""

    def __init__(self, channel: grpc.aio.Channel, address: str, *, recovery_timeout: float) -> None:
        """recovery_timeout: seconds without the scheduler after which requests end with UNAVAILABLE."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._link: Link = Link("scheduler", stub.Connect, self)
        self._address = address
        self._recovery_timeout = recovery_timeout
        self._model_info: common_pb2.ModelInfo | None = None
        self._changed = asyncio.Event()
        self._live: dict[int, _Live] = {}
        self._next_id = 1
        # Nothing is sent before the scheduler's hello: what left _unsent did arrive, unless the stream broke just then.
        self._is_up = False
        self._unsent: dict[int, _Live] = {}
        self._aborts: list[int] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._given_up = False

    @property
    def model_info(self) -> common_pb2.ModelInfo | None:
        """The model behind the scheduler; None until it said so once."""
        return self._model_info

    @property
    def available(self) -> bool:
        """Whether requests can be served, now or after a short interruption."""
        return self._model_info is not None and not self._given_up

    @property
    def changed(self) -> asyncio.Event:
        """Set once `available` or `model_info` may differ from now; get it before you look at them."""
        return self._changed

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def run(self) -> None:
        """Keeps the stream up until cancelled."""
        self._start_timer()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run(), name="scheduler-link")
                tasks.create_task(self._send_all(), name="scheduler-sender")
        finally:
            self._stop_timer()

    def submit(self, request: scheduler_pb2.TokenRequest, listener: TokenListener) -> int:
        """Starts a request, or queues it while the stream is down; returns its request_id, for abort().

        Sets request.request_id and keeps the message. Raises RpcError (UNAVAILABLE) after the recovery timeout.
        """
        self._check_available()
        request_id = request.request_id = self._next_id
        self._next_id += 1
        self._live[request_id] = self._unsent[request_id] = _Live(request, listener)
        self._count_live()
        self._wake.set()
        return request_id

    def abort(self, request_id: int) -> None:
        """Ends a request; its listener hears no more. Ids of requests that ended are ignored."""
        if self._live.pop(request_id, None) is None:
            return
        self._count_live()
        if self._unsent.pop(request_id, None) is None:
            self._aborts.append(request_id)
            self._wake.set()

    async def drained(self) -> None:
        """Returns when no request is live."""
        await self._idle.wait()

    # What pagewire.streams.Link calls.

    async def on_connect(self, send: Callable[[scheduler_pb2.SchedulerServiceConnectRequest], Awaitable[None]]) -> None:
        # Ids are unique per stream, so those that were aborted mean nothing on this one.
        self._aborts.clear()
        for request_id, live in self._live.items():
            if request_id not in self._unsent:
                live.request.resume_token_ids.extend(live.received)
                live.received.clear()
                live.request.resubmitted = True
                stats.RESUBMISSIONS.inc()
        self._unsent = dict(self._live)

    def on_message(self, message: scheduler_pb2.SchedulerServiceConnectResponse) -> None:
        if message.HasField("hello"):
            self._on_hello(message.hello)
            return
        token_ids, start, num_taken = list(message.token_ids), 0, 0
        columns = zip(
            message.request_ids, message.num_tokens, message.finish_reasons, message.cached_tokens, strict=True
        )
        for index, (request_id, num_tokens, finish_reason, cached_tokens) in enumerate(columns):
            new = token_ids[start : start + num_tokens]
            start += num_tokens
            live = self._live.get(request_id)
            if live is None:  # aborted; this was on its way
                continue
            num_taken += num_tokens
            if finish_reason:
                del self._live[request_id]
                self._count_live()
            else:
                live.received += new
            if index in message.errors:
                live.listener.on_error(RpcError.from_message(message.errors[index]))
                continue
            stop_token_id = message.stop_token_ids.get(index)
            logprobs = message.logprobs.get(index)
            try:
                live.listener.on_tokens(new, finish_reason, cached_tokens, stop_token_id, logprobs)
            except Exception as error:
                # One request's defect must not break the stream of all, which would bring it back again and again.
                logger.exception("a request's tokens could not be handled")
                self.abort(request_id)
                live.listener.on_error(RpcError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))
        stats.DETOKENIZED_TOKENS.inc(num_taken)
        if start != len(token_ids):
            raise ValueError(f"the scheduler announced {start} tokens and sent {len(token_ids)}")

    def on_disconnect(self, reason: str) -> None:
        self._is_up = False
        self._start_timer()

    def _on_hello(self, model_info: common_pb2.ModelInfo) -> None:
        logger.info(
            "scheduler at %s serves %s, max_model_len %d",
            self._address,
            model_info.model,
            model_info.max_model_len,
        )
        self._model_info = model_info
        self._is_up = True
        self._wake.set()
        self._given_up = False
        self._stop_timer()
        self._notify()

    def _start_timer(self) -> None:
        if self._give_up_timer is None and not self._given_up:
            loop = asyncio.get_running_loop()
            self._give_up_timer = loop.call_later(self._recovery_timeout, self._give_up)

    def _stop_timer(self) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    def _give_up(self) -> None:
        self._give_up_timer = None
        self._given_up = True
        live, self._live, self._unsent = self._live, {}, {}
        self._count_live()
        logger.error("%s; %d requests fail", self._unavailable_message(), len(live))
        for request in live.values():
            request.listener.on_error(RpcError(grpc.StatusCode.UNAVAILABLE, self._unavailable_message()))
        self._notify()

    def _count_live(self) -> None:
        stats.REQUESTS_IN_FLIGHT.set(len(self._live))
        if self._live:
            self._idle.clear()
        else:
            self._idle.set()

    def _check_available(self) -> None:
        if self._given_up:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, self._unavailable_message())

    def _unavailable_message(self) -> str:
        return (
            f"the scheduler at {self._address} has been away for more than {self._recovery_timeout:g} s "
            "(--recovery-timeout); try again later"
        )

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _send_all(self) -> None:
        """The only sender: whatever is unsent goes out together."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._is_up and (self._unsent or self._aborts):
                await self._link.send(self._take_message())

    def _take_message(self) -> scheduler_pb2.SchedulerServiceConnectRequest:
        message = scheduler_pb2.SchedulerServiceConnectRequest(abort_request_ids=self._aborts)
        self._aborts = []
        num_tokens = 0
        while self._unsent and num_tokens < _MAX_TOKENS_PER_MESSAGE:
            request = self._unsent.pop(next(iter(self._unsent))).request
            message.requests.append(request)
            num_tokens += len(request.prompt_token_ids) + len(request.resume_token_ids)
        return message
