"""The generations of one HTTP response, its choices, and their outputs.

Outputs are merged until the response takes them, so a slow HTTP client delays only itself. A client that does not read
is aborted at MAX_PENDING_BYTES.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from pagewire.gateway.core import metrics
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceDelta, ChoiceOutput, ChoiceOutputs, UnreadOutputs
from pagewire.v1 import common_pb2
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from pagewire.v1.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    PromptLogprobs,
)
from pagewire.wire.rpc import RpcError, deadline_of
from pagewire.wire.status import error_details
from pagewire.wire.streams import LinkedRequest

MAX_PENDING_BYTES = 1024 * 1024


class PendingChoice(LinkedRequest):
    """One choice of a reply: its request, and the output so far."""

    __slots__ = (
        "adapter_digest",
        "cached_tokens",
        "index",
        "prompt_logprobs",
        "prompt_token_ids",
        "reply",
        "request",
        "token_ids",
        "usage",
        "weights_version",
    )

    def __init__(self, request: GenerateRequest, index: int, reply: "Reply") -> None:
        super().__init__()
        self.request = request
        self.index = index
        self.reply = reply
        self.cached_tokens: int | None = None
        self.prompt_token_ids: list[int] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        self.token_ids: list[int] = []
        self.usage = common_pb2.Usage()  # up to the latest output
        self.weights_version = ""  # of the weights that generate its tokens; "" = unknown
        self.adapter_digest = ""  # of the adapter that does, if the request names one

    def to_submit(self) -> "Submission":
        return Submission(self, resumes=self.was_sent or bool(self.prompt_token_ids))

    def fail(self, error: RpcError) -> None:
        self.reply.fail(error)

    def add_earlier(self, response: GenerateResponse) -> None:
        """Records an output of an attempt by another process."""
        noted = GenerateResponse()
        noted.CopyFrom(response)
        self.add_response(noted)

    def add_response(self, response: GenerateResponse) -> None:
        """Records a response, and removes from it the fields that clients do not see."""
        if response.prompt_token_ids:
            # Sent again after a resubmission, unchanged.
            self.prompt_token_ids[:] = response.prompt_token_ids
            response.ClearField("prompt_token_ids")
        if response.weights_version:
            self.weights_version = response.weights_version
            response.ClearField("weights_version")
        if response.adapter_digest:
            self.adapter_digest = response.adapter_digest
            response.ClearField("adapter_digest")
        if response.HasField("prompt_logprobs"):
            self.prompt_logprobs = PromptLogprobs()
            self.prompt_logprobs.CopyFrom(response.prompt_logprobs)
            response.ClearField("prompt_logprobs")
        if self.cached_tokens is None:
            self.cached_tokens = response.usage.cached_tokens
        else:
            # A request that resumes after an interruption finds its own blocks in the cache.
            response.usage.cached_tokens = self.cached_tokens
        if response.usage.prompt_tokens:
            self.usage.CopyFrom(response.usage)
        self.token_ids.extend(response.token_ids)

    def add_delta(self, delta: ChoiceDelta) -> None:
        self.token_ids += delta.token_ids
        self.usage.completion_tokens += len(delta.token_ids)


class Submission(NamedTuple):
    """A choice that is about to be sent. Its message is written in place, so that the prompt is copied once."""

    choice: PendingChoice
    resumes: bool  # after an interruption

    def ByteSize(self) -> int:
        """The size of the request in bytes, roughly."""
        return self.choice.request.ByteSize()

    def write(self, message: GenerateSubmission) -> None:
        """Fills an empty message."""
        choice, reply = self.choice, self.choice.reply
        message.number = choice.number
        message.request.CopyFrom(choice.request)
        if reply.context is not None:
            message.context.CopyFrom(reply.context)
        if reply.deadline is not None:
            timeout = max(0.0, reply.deadline - time.monotonic())
            message.context.timeout.CopyFrom(error_details.duration(timeout))
        # The first choice is admitted or refused for all; otherwise they would wait for each other.
        message.resubmitted = self.resumes or choice.index > 0
        if self.resumes:
            metrics.RESUBMISSIONS.inc()
        if choice.prompt_token_ids:
            if not _has_images(message.request):  # token ids do not carry pixels
                message.request.output_parsing.tools.extend(choice.request.chat.tools)
                message.request.token_ids.ids[:] = choice.prompt_token_ids
            message.resume_token_ids[:] = choice.token_ids
            message.weights_version = choice.weights_version
            message.adapter_digest = choice.adapter_digest


def _has_images(request: GenerateRequest) -> bool:
    return any(part.HasField("image") for message in request.chat.messages for part in message.parts)


Abort = Callable[[Iterable[PendingChoice]], None]


class Reply:
    """The choices of one HTTP response, and their unread outputs."""

    def __init__(
        self,
        abort: Abort,
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        context: RequestContext | None = None,
    ) -> None:
        """
        Args:
            abort: ends choices upstream.
            streaming: whether outputs are read as they arrive, or once at the end.
        """
        self.choices = [PendingChoice(request, index, self) for index, request in enumerate(requests)]
        self.context = context
        self.deadline = None if context is None else deadline_of(context)
        self._abort = abort
        self._streaming = streaming
        self._running = len(requests)
        self._pending: dict[int, UnreadOutputs] = {}  # by index of the choice
        self._pending_bytes = 0
        self._error: BaseException | None = None
        self._is_woken = False
        self._waiter: asyncio.Future[None] | None = None  # of the reader; an Event costs more, for each token

    def push(self, choice: PendingChoice, output: ChoiceOutput, size: int) -> None:
        """Adds an output. size: bytes, roughly."""
        unread = self._pending.get(choice.index)
        if unread is None:
            self._pending[choice.index] = UnreadOutputs(output)
        else:
            unread.add(output)
        if output.finish_reason:
            self._running -= 1
        if self._streaming:
            self._pending_bytes += size
            if self._pending_bytes > MAX_PENDING_BYTES:
                self.fail(ApiError(408, "the client does not read its response"))
            self._wake()
        elif not self._running:
            self._wake()

    @property
    def has_ended(self) -> bool:
        """True if all outputs were read."""
        return not self._running and not self._pending

    def ended_earlier(self) -> None:
        """Counts a choice that ended in an earlier attempt."""
        self._running -= 1

    def fail(self, error: BaseException) -> None:
        """Ends the response with an error, and its choices upstream. The first error counts."""
        self.abort()
        if self._error is None:
            self._error = error
        self._pending.clear()
        self._wake()

    def abort(self) -> None:
        """Ends running choices upstream."""
        self._abort(self.choices)

    async def whole(self) -> ChoiceOutputs:
        """Returns all outputs of every choice, when all have ended. Raises RpcError, or the error of fail()."""
        while self._running:
            await self._woken()
        return self._take()

    async def next(self) -> ChoiceOutputs:
        """Returns new outputs, merged by choice; empty when every choice has ended.

        Raises RpcError, or the error of fail(), after the last output too.
        """
        while not self._pending and (self._running or self._error is not None):
            await self._woken()
        return self._take()

    def _wake(self) -> None:
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _woken(self) -> None:
        if not self._is_woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_woken = False
        if self._error is not None:
            raise self._error

    def _take(self) -> ChoiceOutputs:
        pending, self._pending = self._pending, {}
        self._pending_bytes = 0
        return [(index, unread.read()) for index, unread in pending.items()]


class Line(Protocol):
    """Runs generations through the tokenizer service."""

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        context: RequestContext | None = None,
        earlier: Sequence[Sequence[GenerateResponse]] = (),
    ) -> Reply:
        """Starts one generation per request.

        Args:
            context: the context of all requests.
            earlier: for each request, all outputs of an earlier attempt; the generation continues after them.

        Raises RpcError UNAVAILABLE.
        """
