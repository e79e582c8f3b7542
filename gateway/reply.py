"""What one HTTP response waits for: one generation per choice.

News is merged until the response takes it, so a slow HTTP client costs only itself; one that does not read at all is
aborted at MAX_PENDING_BYTES.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from pagewire.gateway.errors import ApiError
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenLogprob

MAX_PENDING_BYTES = 1024 * 1024


class Delta:
    """More output of a generation that goes on, and nothing else; looks like the GenerateResponse that would say it."""

    __slots__ = ("text", "token_ids")

    logprobs: Sequence[TokenLogprob] = ()
    finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED

    def __init__(self, text: str, token_ids: list[int]) -> None:
        self.text = text
        self.token_ids = token_ids


Response = GenerateResponse | Delta
News = list[tuple[int, Response]]


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
        "usage",
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
        self.usage = common_pb2.Usage()  # up to the latest news

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
        self._pending: News = []
        self._pending_bytes = 0
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    def push(self, generation: Generation, response: Response, size: int) -> None:
        """size: bytes, roughly."""
        self._pending.append((generation.index, response))
        if response.finish_reason:
            self._running -= 1
        if self._streaming:
            self._pending_bytes += size
            if self._pending_bytes > MAX_PENDING_BYTES:
                self.fail(ApiError(408, "the client does not read its response"))
            self._wake.set()
        elif not self._running:
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

    async def next(self) -> News:
        """What has arrived since the last time, merged by choice; empty once every choice has its finish reason.

        Raises RpcError, or whatever fail() was given, after the last news too.
        """
        while not self._pending and (self._running or self._error is not None):
            await self._woken()
        return self._take()

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error

    def _take(self) -> News:
        pending, self._pending = self._pending, []
        self._pending_bytes = 0
        if len(pending) < 2:
            return pending
        by_choice: dict[int, list[Response]] = {}
        for index, response in pending:
            by_choice.setdefault(index, []).append(response)
        return [(index, _merge(responses)) for index, responses in by_choice.items()]


def _merge(responses: list[Response]) -> Response:
    """What one response would have said for all, but for the usage, which a generation keeps."""
    if len(responses) == 1:
        return responses[0]
    text = "".join([response.text for response in responses])
    if all(isinstance(response, Delta) for response in responses):
        return Delta(text, [token_id for response in responses for token_id in response.token_ids])
    merged = GenerateResponse()
    for response in responses:
        if isinstance(response, Delta):
            merged.token_ids.extend(response.token_ids)
        else:
            merged.MergeFrom(response)
    merged.text = text
    return merged
