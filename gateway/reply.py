"""What one HTTP response waits for: one generation per choice.

News is merged until the response takes it, so a slow HTTP client costs only itself; one that does not read at all is
aborted at MAX_PENDING_BYTES.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from gateway.errors import ApiError
from protos.pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse

MAX_PENDING_BYTES = 1024 * 1024

News = list[tuple[int, GenerateResponse]]


class Generation:
    """One request, with what is needed to submit it again."""

    __slots__ = (
        "cached_tokens",
        "index",
        "lost_at",
        "number",
        "prompt_token_ids",
        "reply",
        "request",
        "token_ids",
        "was_sent",
    )

    def __init__(self, request: GenerateRequest, index: int, reply: "Reply") -> None:
        self.request = request
        self.index = index
        self.reply = reply
        self.number = 0
        # Over a stream that was up: the request may have been let in there.
        self.was_sent = False
        # When the stream broke under it, until there is news again.
        self.lost_at: float | None = None
        self.cached_tokens: int | None = None
        self.prompt_token_ids: list[int] = []
        self.token_ids: list[int] = []

    def to_submit(self) -> GenerateRequest:
        """The request, going on after the tokens that have arrived."""
        if not self.was_sent:
            return self.request
        request = GenerateRequest()
        request.CopyFrom(self.request)
        request.resubmitted = True
        if self.prompt_token_ids:
            request.token_ids.ids[:] = self.prompt_token_ids
            request.resume_token_ids[:] = self.token_ids
        return request


Abort = Callable[[Iterable[Generation]], None]


class Reply:
    """The generations of one HTTP response and the news of them that was not taken yet."""

    def __init__(self, abort: Abort, requests: Sequence[GenerateRequest], *, streaming: bool) -> None:
        """abort: ends generations upstream.

        streaming: news is wanted as it comes; otherwise only once, when all is there.
        """
        self.generations = [Generation(request, index, self) for index, request in enumerate(requests)]
        self._abort = abort
        self._streaming = streaming
        self._running = len(requests)
        self._pending: dict[int, list[GenerateResponse]] = {}
        self._pending_bytes = 0
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    def push(self, generation: Generation, response: GenerateResponse) -> None:
        self._pending.setdefault(generation.index, []).append(response)
        if response.finish_reason:
            self._running -= 1
        if self._streaming:
            self._pending_bytes += response.ByteSize()
            if self._pending_bytes > MAX_PENDING_BYTES:
                self.fail(ApiError(408, "the client does not read its response"))
        if self._streaming or not self._running:
            self._wake.set()

    def fail(self, error: BaseException) -> None:
        """Ends the response with an error and its generations upstream. The first error counts."""
        self.abort()
        if self._error is None:
            self._error = error
        self._pending.clear()
        self._wake.set()

    def abort(self) -> None:
        """Ends what still runs upstream."""
        self._abort(self.generations)

    async def whole(self) -> News:
        """All the news of every choice, once each has its finish reason. Raises RpcError, or what fail() was given."""
        while self._running:
            await self._woken()
        return self._take()

    async def __aiter__(self) -> AsyncIterator[News]:
        """Yields what has arrived since the last time, merged by choice, until every choice has its finish reason.

        Raises RpcError, or whatever fail() was given.
        """
        while True:
            await self._woken()
            if news := self._take():
                yield news
            if not self._running:
                return

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error

    def _take(self) -> News:
        pending, self._pending = self._pending, {}
        self._pending_bytes = 0
        return [(index, _merge(responses)) for index, responses in pending.items()]


def _merge(responses: list[GenerateResponse]) -> GenerateResponse:
    """What one response would have said for all."""
    merged = responses[0]
    if len(responses) > 1:
        text = "".join([response.text for response in responses])
        for response in responses[1:]:
            merged.MergeFrom(response)
        merged.text = text
    return merged
