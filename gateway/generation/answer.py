"""What every API that generates implements: the answer to one request."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reply import ChoiceDelta, ChoiceOutput, PendingChoice
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
    """The wire format of one answer: streamed (start, delta..., end or error) or whole. `out` takes the pieces of the
    stream.
    """

    operation: str

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        """Events before any text, if there are any; the first output has arrived."""

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        """Events that say the output; none if it says nothing to a client yet."""

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        """The last events."""

    def error(self, out: list[bytes], error: ApiError) -> None:
        """The last events of a stream that fails after its first output."""

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
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
