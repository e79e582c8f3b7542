"""What chat and text completions have in common in their answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagewire.gateway.reply import ChoiceDelta, ChoiceOutput, PendingChoice
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import TokenLogprob

# JSON has no -Infinity; vLLM's and OpenAI's floor.
MIN_LOGPROB = -9999.0

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_ERROR: "error",
}


@dataclass(frozen=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str

    def members(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


class Answer(Protocol):
    """The wire format of one answer: streamed (start, delta..., end) or whole."""

    operation: str

    def start(self, generations: Sequence[PendingChoice], usage: "UsageTotal") -> str:
        """Events before any text; the first output has arrived."""

    def delta(self, generation: PendingChoice, news: ChoiceOutput, usage: "UsageTotal") -> str:
        """Events that say the output; empty if it says nothing to a client yet."""

    def end(self, usage: "UsageTotal") -> str:
        """The last events."""

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: "UsageTotal"
    ) -> dict[str, Any]:
        """The answer to a client that does not stream."""


def finish_reason(response: ChoiceOutput) -> str | None:
    return _FINISH_REASONS[response.finish_reason] if response.finish_reason else None


def stop_reason(response: ChoiceOutput) -> str | int | None:
    """The stop string or stop token that ended the generation (an extension of OpenAI's format)."""
    if isinstance(response, ChoiceDelta):
        return None
    which = response.WhichOneof("stop_reason")
    return getattr(response, which) if which else None


def logprob_of(token: TokenLogprob) -> float:
    return max(token.logprob, MIN_LOGPROB)


class UsageTotal:
    """Token counts of an answer, from the cumulative counts of its generations."""

    def __init__(self, generations: Sequence[PendingChoice], choices_per_prompt: int) -> None:
        """The generations of one prompt are neighbours; each prompt counts once."""
        self._generations = generations
        self._choices_per_prompt = choices_per_prompt

    @property
    def prompt_tokens(self) -> int:
        return sum(one.usage.prompt_tokens for one in self._generations[:: self._choices_per_prompt])

    @property
    def completion_tokens(self) -> int:
        return sum(one.usage.completion_tokens for one in self._generations)

    @property
    def cached_tokens(self) -> int:
        return sum(one.usage.cached_tokens for one in self._generations[:: self._choices_per_prompt])

    def members(self) -> dict[str, Any]:
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
