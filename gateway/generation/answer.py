"""The interface of an answer, which every API that generates implements."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceDelta, ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.schema.answers import FinishReason, StopReason
from pagewire.v1 import common_pb2

_FINISH_REASONS: Mapping[common_pb2.FinishReason, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_ERROR: "error",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class Answer(Protocol):
    """The format of one answer: streamed (start, delta..., end or error) or whole. `out` collects a stream's pieces."""

    operation: str

    @property
    def id(self) -> str:
        """The id in the body of the answer."""

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        """Writes the events that precede the text, once the first output has arrived."""

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        """Writes the events of an output, if it has any content for the client."""

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        """Writes the last events."""

    def error(self, out: list[bytes], error: ApiError) -> None:
        """Writes the last events of a stream that fails after its first output."""

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> Body | Sequence[Body]:
        """Returns the answer to a client that does not stream."""


def finish_reason(response: ChoiceOutput) -> FinishReason:
    """Returns the finish reason of a response that has one."""
    return _FINISH_REASONS[response.finish_reason]


def stop_reason(response: ChoiceOutput) -> StopReason:
    if isinstance(response, ChoiceDelta):
        return None
    which = response.WhichOneof("stop_reason")
    return getattr(response, which) if which else None


def version_of(generation: PendingChoice) -> str:
    """Returns the version of the weights that generate the tokens, and the digest of their adapter; "" = unknown."""
    digest = generation.adapter_digest[:12]
    return f"{generation.weights_version}+{digest}" if digest else generation.weights_version


def fingerprint(generations: Sequence[PendingChoice]) -> str | None:
    """Returns the version of the weights (and adapter) that generated the choices, or None if it is unknown.

    Choices that began while weights were replaced may have several versions.
    """
    return ",".join(dict.fromkeys(version for one in generations if (version := version_of(one)))) or None
