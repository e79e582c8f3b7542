"""The streams to the schedulers: every request of this service, over connections that may break and come back."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import grpc

from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.affinity import affinity_of
from pagewire.services.tokenizer.received import Received
from pagewire.v1 import scheduler_link_pb2
from pagewire.v1.common_pb2 import Adapter, FinishReason, Logprobs, ModelInfo, Vector
from pagewire.v1.scheduler_link_pb2 import (
    SchedulerLinkServiceConnectRequest,
    SchedulerLinkServiceConnectResponse,
    TokenSubmission,
)
from pagewire.v1.scheduler_link_pb2_grpc import SchedulerLinkServiceStub
from pagewire.wire.discovery.listed import Discovery, Listed
from pagewire.wire.rpc import RpcError
from pagewire.wire.status import error_details
from pagewire.wire.streams import Affinity, LinkedRequest, OpenCall, Peer, Pings, ResubmittingLink

logger = logging.getLogger(__name__)

# Seconds for which a request that depends on the model waits for a scheduler, which may be about to start.
_START_TIMEOUT_S = 10.0
_NAME = scheduler_link_pb2.DESCRIPTOR.services_by_name["SchedulerLinkService"].full_name


_OpenCall = OpenCall[SchedulerLinkServiceConnectRequest, SchedulerLinkServiceConnectResponse]


class TokenListener(Protocol):
    """Receives the outputs of one request. Called from the stream's task."""

    def on_tokens(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        cached_tokens: int,
        stop_token_id: int | None,
        logprobs: Logprobs | None,
    ) -> None:
        """Takes new tokens, possibly none. Nothing follows a set finish_reason."""

    def on_weights(self, version: str) -> None:
        """Takes the version of the weights that compute all of its tokens, or its vector. The first output follows."""

    def on_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Takes the log probabilities of the prompt's tokens from the second on. The first output follows."""

    def on_vector(self, vector: Vector) -> None:
        """Takes the vector that ends a request with yields_vector."""

    def on_error(self, error: RpcError) -> None:
        """Takes the error that ends the request."""


class SubmittedRequest(LinkedRequest):
    """A request at the scheduler: its message, and the tokens received since the message was last sent."""

    __slots__ = ("deadline", "listener", "message", "received")

    def __init__(
        self,
        message: TokenSubmission,
        listener: TokenListener,
        affinity: Affinity | None = None,
        deadline: float | None = None,
    ) -> None:
        """Keeps the message and changes it. deadline: in time.monotonic()."""
        super().__init__()
        self.affinity = affinity
        self.message = message
        self.deadline = deadline
        self.listener = listener
        self.received: list[int] = []

    def to_submit(self) -> TokenSubmission:
        self.message.request_id = self.number
        if self.deadline is not None:
            timeout = max(0.0, self.deadline - time.monotonic())
            self.message.context.timeout.CopyFrom(error_details.duration(timeout))
        if self.was_sent:
            stats.RESUBMISSIONS.inc()
            self.message.resubmitted = True
            self.message.resume_token_ids.extend(self.received)
            self.received.clear()
        return self.message

    def fail(self, error: RpcError) -> None:
        self.listener.on_error(error)


class SchedulerLink(
    ResubmittingLink[SubmittedRequest, SchedulerLinkServiceConnectRequest, SchedulerLinkServiceConnectResponse]
):
    """Submits requests and hands out their outputs; `run()` keeps the streams up."""

    def __init__(
        self,
        discovery: Discovery,
        connect: Callable[[Listed], grpc.aio.Channel],
        *,
        recovery_timeout: float,
        hang_timeout: float = 0.0,
    ) -> None:
        """recovery_timeout: seconds without a scheduler after which requests end with UNAVAILABLE. hang_timeout:
        seconds without progress after which a scheduler counts as hung; 0 = never."""
        super().__init__("scheduler", discovery, connect, recovery_timeout)
        self._hang_timeout = hang_timeout
        self._model_info: ModelInfo | None = None  # what does not change
        self.adapters: dict[str, Adapter] = {}  # that requests may name, by name
        self.sleep_level = 0  # of the model; 0: it is awake
        self._differs: set[str] = set()  # addresses that a warning was logged for
        stats.REQUESTS_IN_FLIGHT.set_function(lambda: self.num_live)

    @property
    def model_info(self) -> ModelInfo | None:
        """The model behind the schedulers; None until one has reported it, which it does before it is available."""
        return self._model_info

    def open(self, channel: grpc.aio.Channel) -> tuple[_OpenCall, Pings]:
        return SchedulerLinkServiceStub(channel).Connect, Pings(channel, _NAME, self._hang_timeout)

    def check_greeting(
        self, peer: Peer[Any, SchedulerLinkServiceConnectResponse], message: SchedulerLinkServiceConnectResponse
    ) -> None:
        """Refuses a scheduler that serves another model than the others, as they are interchangeable."""
        if _lasting(message.hello) == self._model_info or not self.is_up:
            self._differs.discard(peer.address)
            return
        if peer.address not in self._differs:
            self._differs.add(peer.address)
            logger.warning(
                "the scheduler at %s is not used: it serves %s with requests of up to %d tokens, while others serve "
                "%s with %d; give all schedulers executors of the same model and --max-model-len",
                peer.address,
                message.hello.model,
                message.hello.max_model_len,
                self._model_info.model if self._model_info else "",
                self._model_info.max_model_len if self._model_info else 0,
            )
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, "the scheduler serves another model than the others")

    def affinity_of(self, received: Received) -> Affinity | None:
        """Returns the affinity of a request; None if there is only one scheduler."""
        return affinity_of(received) if len(self.peers) > 1 else None

    async def wait_for_model(self) -> ModelInfo:
        """Returns the model as soon as a scheduler has reported it. Raises RpcError (UNAVAILABLE)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                while self._model_info is None:
                    await self.changed.wait()
        if self._model_info is None:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the model is not loaded yet; try again later")
        return self._model_info

    def build_message(self, submits: list[TokenSubmission], aborts: list[int]) -> SchedulerLinkServiceConnectRequest:
        return SchedulerLinkServiceConnectRequest(requests=submits, abort_request_ids=aborts)

    def on_response(self, message: SchedulerLinkServiceConnectResponse) -> None:
        if message.HasField("hello"):
            self._on_hello(message.hello)
            return
        token_ids, start, num_taken = message.token_ids[:], 0, 0
        errors, vectors, versions = message.errors, message.vectors, message.weights_versions  # mostly empty
        has_more = errors or vectors or versions or message.prompt_logprobs or message.logprobs
        columns = zip(
            message.request_ids[:],
            message.num_tokens[:],
            message.finish_reasons[:],
            message.cached_tokens[:],
            strict=True,
        )
        for index, (number, num_tokens, finish_reason, cached_tokens) in enumerate(columns):
            new = token_ids[start : start + num_tokens]
            start += num_tokens
            request = self.answered(number)
            if request is None:
                continue
            num_taken += num_tokens
            if finish_reason:
                self.finish(request)
            else:
                request.received += new
            if has_more and index in errors:
                request.fail(RpcError.from_message(errors[index]))
                continue
            stop_token_id = message.stop_token_ids.get(index) if finish_reason else None
            logprobs = message.logprobs.get(index) if has_more else None
            try:
                if has_more and index in versions:
                    request.message.weights_version = versions[index]
                    request.listener.on_weights(request.message.weights_version)
                if has_more and index in vectors:
                    request.listener.on_vector(vectors[index])
                    continue
                if has_more and index in message.prompt_logprobs:
                    request.listener.on_prompt_logprobs(message.prompt_logprobs[index])
                request.listener.on_tokens(new, finish_reason, cached_tokens, stop_token_id, logprobs)
            except Exception as error:
                # An error in one request must not break the stream of all.
                logger.exception("a request's tokens could not be handled")
                self.abort(request)
                request.fail(RpcError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))
        stats.DETOKENIZED_TOKENS.inc(num_taken)
        if start != len(token_ids):
            raise ValueError(f"the scheduler announced {start} tokens and sent {len(token_ids)}")

    def _on_hello(self, model_info: ModelInfo) -> None:
        self.adapters = {adapter.name: adapter for adapter in model_info.adapters}
        self.sleep_level = model_info.sleep_level
        model_info = _lasting(model_info)
        if model_info != self._model_info:
            logger.info("%s is served, max_model_len %d", model_info.model, model_info.max_model_len)
        self._model_info = model_info


def _lasting(model_info: ModelInfo) -> ModelInfo:
    copy = ModelInfo()
    copy.CopyFrom(model_info)
    copy.ClearField("adapters")
    copy.ClearField("sleep_level")
    return copy
