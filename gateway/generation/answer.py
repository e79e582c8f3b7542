"""What chat and text completions have in common in their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from pagewire.gateway.core.encoding import DONE, encode, event
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.reply import ChoiceDelta, ChoiceOutput, PendingChoice
from pagewire.gateway.schema.requests import StreamOptions
from pagewire.gateway.schema.responses import (
    Body,
    ChatChunkChoice,
    ChatCompletionChunk,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    StopReason,
    UsageInfo,
)
from pagewire.v1 import common_pb2

_FINISH_REASONS: Mapping[common_pb2.FinishReason, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_ERROR: "error",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True)
class Head:
    """What an answer, and every chunk of it, begins with."""

    id: str
    created: int  # Unix time, seconds
    model: str


class Answer(Protocol):
    """The wire format of one answer: streamed (start, delta..., end or error) or whole. `out` takes the pieces of the
    stream.
    """

    operation: str

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: "UsageTotal") -> None:
        """Events before any text, if there are any; the first output has arrived."""

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: "UsageTotal") -> None:
        """Events that say the output; none if it says nothing to a client yet."""

    def end(self, out: list[bytes], usage: "UsageTotal") -> None:
        """The last events."""

    def error(self, out: list[bytes], error: ApiError) -> None:
        """The last events of a stream that fails after its first output."""

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: "UsageTotal"
    ) -> Body | Sequence[Body]:
        """The answer to a client that does not stream."""


def finish_reason(response: ChoiceOutput) -> FinishReason:
    """Of a response that has one."""
    return _FINISH_REASONS[response.finish_reason]


def stop_reason(response: ChoiceOutput) -> StopReason:
    if isinstance(response, ChoiceDelta):
        return None
    which = response.WhichOneof("stop_reason")
    return getattr(response, which) if which else None


def fingerprint(generations: Sequence[PendingChoice]) -> str | None:
    """What an answer says of the weights that made it: their version. Choices that began while weights were replaced
    may be of several; None: nobody has said."""
    return ",".join(dict.fromkeys(one.weights_version for one in generations if one.weights_version)) or None


class UsageTotal:
    """Token counts of an answer, from the cumulative counts of its generations."""

    def __init__(
        self, generations: Sequence[PendingChoice], choices_per_prompt: int, *, counts_output: bool = True
    ) -> None:
        """The generations of one prompt are neighbours; each prompt counts once. counts_output: false where no token of
        the output is wanted."""
        self._generations = generations
        self._choices_per_prompt = choices_per_prompt
        self._counts_output = counts_output

    @property
    def prompt_tokens(self) -> int:
        return sum(one.usage.prompt_tokens for one in self._generations[:: self._choices_per_prompt])

    @property
    def completion_tokens(self) -> int:
        return sum(one.usage.completion_tokens for one in self._generations) if self._counts_output else 0

    @property
    def cached_tokens(self) -> int:
        return sum(one.usage.cached_tokens for one in self._generations[:: self._choices_per_prompt])

    @property
    def reasoning_tokens(self) -> int:
        return sum(one.usage.reasoning_tokens for one in self._generations)

    def info(self) -> UsageInfo:
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens
        return UsageInfo(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens),
        )


class ChunkWriter:
    """The events of one streamed completion. What they share is encoded once: per token only the choice is."""

    def __init__(self, chunk: ChatCompletionChunk | CompletionChunk, options: StreamOptions | None) -> None:
        """chunk: without choices; what all the events have in common."""
        # One more event with the usage at the end, and `usage: null` in the others.
        self._include_usage = bool(options and options.include_usage)
        # The usage up to there instead of null.
        self._continuous_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        if self._include_usage:
            chunk.usage = None
        self._chunk = chunk
        self._framed_for: str | None = None  # the version of weights that these two say
        self._head, self._end = self._frame(None)

    def _frame(self, version: str | None) -> tuple[bytes, bytes]:
        """What stands before and behind a choice."""
        self._framed_for = self._chunk.system_fingerprint = version
        # No string holds the separator: its quotes would be escaped there.
        head, end = event(self._chunk).split(b'"choices":[]')
        return head + b'"choices":[', b"]" + end

    def chunk(
        self,
        out: list[bytes],
        choice: ChatChunkChoice | CompletionChunkChoice,
        usage: UsageTotal,
        extra: Mapping[str, Any] | None = None,
        version: str = "",
    ) -> None:
        """usage: up to here; extra: further fields of this chunk; version: of the weights that make the choice."""
        if version and version != self._framed_for:
            self._head, self._end = self._frame(version)
        if extra or self._continuous_usage:
            fields = {"usage": usage.info()} if self._continuous_usage else {}
            out.append(event(msgspec.structs.replace(self._chunk, choices=[choice], **fields, **(extra or {}))))
        else:
            out += (self._head, encode(choice), self._end)

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        """The last events."""
        if self._include_usage:
            out.append(event(msgspec.structs.replace(self._chunk, usage=usage.info())))
        out.append(DONE)

    def error(self, out: list[bytes], error: ApiError) -> None:
        """The last events instead."""
        out += (event(error.body()), DONE)
