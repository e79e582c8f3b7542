"""The one stream to the tokenizer that carries every generation of this gateway, and what makes it survive a break."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import grpc

from pagewire import rpc
from pagewire.gateway import metrics
from pagewire.gateway.presence import Presence
from pagewire.gateway.reply import Delta, Generation, Reply
from pagewire.rpc import RpcError
from pagewire.streams import MAX_BACKOFF_S, Link
from pagewire.v1.inference_pb2 import (
    ConnectRequest,
    ConnectResponse,
    GenerateRequest,
    GenerateResponse,
    NumberedRequest,
)
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub

# Requests that share one message; far below what gRPC takes.
MAX_SEND_BYTES = 16 * 1024 * 1024
TOKEN_BYTES = 4


class TokenizerLink:
    """Submits generations, hands their news to their replies, and submits them again on a new stream after a break."""

    def __init__(self, channel: grpc.aio.Channel, recovery_timeout: float) -> None:
        self._recovery_timeout = recovery_timeout
        self.presence = Presence(channel, recovery_timeout)
        stub = InferenceServiceStub(channel)
        self._link: Link[ConnectRequest, ConnectResponse] = Link("tokenizer", stub.Connect, self)
        self._numbers = itertools.count(1)
        self._live: dict[int, Generation] = {}
        # Not sent yet, by number.
        self._submits: dict[int, GenerateRequest] = {}
        self._aborts: list[int] = []
        self._wake = asyncio.Event()
        self._lost_at = 0.0
        self._recovery: asyncio.TimerHandle | None = None

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def run(self) -> None:
        """Keeps the stream up and sends, until cancelled."""
        tasks = [asyncio.create_task(self._link.run()), asyncio.create_task(self._send())]
        try:
            await asyncio.gather(*tasks)
        finally:
            if self._recovery is not None:
                self._recovery.cancel()
            await rpc.cancel(tasks)

    def submit(self, requests: Sequence[GenerateRequest], *, streaming: bool) -> Reply:
        """Starts one generation per request; they wait for a tokenizer that is away for a moment.

        Raises RpcError UNAVAILABLE when there has been none for recovery_timeout seconds, or never.
        """
        if not self.presence.is_expected():
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the tokenizer service cannot be reached; try again")
        away_since = self.presence.away_since
        reply = Reply(self.abort, requests, streaming=streaming)
        for generation in reply.generations:
            generation.lost_at = away_since
            self._enqueue(generation)
        if away_since is not None:
            self._watch_recovery()
        return reply

    def abort(self, generations: Iterable[Generation]) -> None:
        for generation in generations:
            if self._live.pop(generation.number, None) is not None and not self._submits.pop(generation.number, None):
                self._aborts.append(generation.number)
                self._wake.set()

    def fail_all(self, error: Callable[[], BaseException]) -> None:
        """Ends every reply with an error of its own."""
        for generation in list(self._live.values()):
            generation.reply.fail(error())

    def _enqueue(self, generation: Generation) -> None:
        generation.number = next(self._numbers)
        self._live[generation.number] = generation
        self._submits[generation.number] = generation.to_submit()
        self._wake.set()

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._submits or self._aborts:
                message = ConnectRequest(abort_numbers=self._aborts, takes_columns=True)
                self._aborts = []
                size = 0
                while self._submits and size < MAX_SEND_BYTES:
                    number, request = next(iter(self._submits.items()))
                    del self._submits[number]
                    message.requests.append(NumberedRequest(number=number, request=request))
                    size += request.ByteSize()
                await self._link.send(message)
                self._note_sent(message)

    def _note_sent(self, message: ConnectRequest) -> None:
        if not (self._link.connected and self.presence.is_there()):
            return  # dropped, or written to a stream that does not come up: on_connect says it again
        for numbered in message.requests:
            if (generation := self._live.get(numbered.number)) is not None:
                metrics.RESUBMISSIONS.inc(generation.was_sent)
                generation.was_sent = True

    async def on_connect(self, send: Callable[[ConnectRequest], Awaitable[None]]) -> None:
        """Every live request again, under new numbers: those of the old stream mean nothing on this one."""
        live = list(self._live.values())
        self._live.clear()
        self._submits.clear()
        self._aborts.clear()
        for generation in live:
            self._enqueue(generation)

    def on_message(self, message: ConnectResponse) -> None:
        for numbered in message.responses:
            generation = self._expected(numbered.number)
            if generation is None:
                continue
            if numbered.HasField("error"):
                del self._live[numbered.number]
                generation.reply.fail(RpcError.from_message(numbered.error))
            else:
                self._on_response(generation, numbered.response)
        token_ids, start = list(message.token_ids), 0
        for number, text, num_tokens in zip(message.numbers, message.texts, message.num_tokens, strict=True):
            delta = Delta(text, token_ids[start : start + num_tokens])
            start += num_tokens
            if (generation := self._expected(number)) is not None:
                self._on_delta(generation, delta)
        if start != len(token_ids):
            raise ValueError(f"the tokenizer announced {start} tokens and sent {len(token_ids)}")

    def _expected(self, number: int) -> Generation | None:
        generation = self._live.get(number)
        if generation is None:
            # Aborted here and not yet there; or submitted just when the stream changed, and again on this one.
            self._aborts.append(number)
            self._wake.set()
        return generation

    def _on_response(self, generation: Generation, response: GenerateResponse) -> None:
        if response.prompt_token_ids:
            # Told again after a resubmission, where it is the same.
            generation.prompt_token_ids[:] = response.prompt_token_ids
            response.ClearField("prompt_token_ids")
        if generation.cached_tokens is None:
            generation.cached_tokens = response.usage.cached_tokens
        else:
            # A request that is computed anew after an interruption hits its own blocks.
            response.usage.cached_tokens = generation.cached_tokens
        if response.usage.prompt_tokens:
            generation.usage.CopyFrom(response.usage)
        generation.token_ids.extend(response.token_ids)
        generation.lost_at = None
        generation.was_sent = True
        if response.finish_reason:
            del self._live[generation.number]
        generation.reply.push(generation, response, response.ByteSize())

    def _on_delta(self, generation: Generation, delta: Delta) -> None:
        generation.token_ids += delta.token_ids
        generation.usage.completion_tokens += len(delta.token_ids)
        generation.reply.push(generation, delta, len(delta.text) + TOKEN_BYTES * len(delta.token_ids))

    def on_disconnect(self, reason: str) -> None:
        self.presence.is_there()
        self._lost_at = time.monotonic()
        for generation in self._live.values():
            if generation.lost_at is None:
                generation.lost_at = self._lost_at
        self._watch_recovery()

    def _watch_recovery(self) -> None:
        lost = [generation.lost_at for generation in self._live.values() if generation.lost_at is not None]
        if lost and self._recovery is None:
            delay = min(lost) + self._recovery_timeout - time.monotonic()
            self._recovery = asyncio.get_running_loop().call_later(delay, self._on_recovery_timeout)

    def _on_recovery_timeout(self) -> None:
        """recovery_timeout after a break: ends what it hit, unless the stream is up again and only the news is late."""
        self._recovery = None
        now = time.monotonic()
        up = self.presence.is_there() and now - self._lost_at > 2 * MAX_BACKOFF_S
        overdue = now - self._recovery_timeout
        for generation in list(self._live.values()):
            if generation.lost_at is None:
                continue
            if up:
                generation.lost_at = None
            elif generation.lost_at <= overdue:
                message = f"the tokenizer service was lost and not back in {self._recovery_timeout:g} s; try again"
                generation.reply.fail(RpcError(grpc.StatusCode.UNAVAILABLE, message))
        self._watch_recovery()
