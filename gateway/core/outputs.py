"""Outputs of choices, and their merging until they are read."""

import io
from collections.abc import Sequence

from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import GenerateResponse, TokenLogprob, ToolCallDelta


class ChoiceDelta:
    """More output of a choice that continues. It has the attributes of the equivalent GenerateResponse."""

    __slots__ = ("text", "token_ids")

    logprobs: Sequence[TokenLogprob] = ()
    reasoning = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED

    def __init__(self, text: str, token_ids: list[int]) -> None:
        self.text = text
        self.token_ids = token_ids


ChoiceOutput = GenerateResponse | ChoiceDelta
ChoiceOutputs = list[tuple[int, ChoiceOutput]]  # by index of the choice


def merged_by_choice(outputs: ChoiceOutputs) -> ChoiceOutputs:
    """Returns one output for each choice."""
    by_choice: dict[int, UnreadOutputs] = {}
    for index, output in outputs:
        if index in by_choice:
            by_choice[index].add(output)
        else:
            by_choice[index] = UnreadOutputs(output)
    return [(index, unread.read()) for index, unread in by_choice.items()]


class UnreadOutputs:
    """The outputs of one choice, merged into one. Its size depends on tokens and text, not on the number of outputs."""

    __slots__ = ("_output", "_reasoning", "_text")

    def __init__(self, output: ChoiceOutput) -> None:
        self._output = output
        # Set when there are several outputs: a growing string would be copied for each.
        self._text: io.StringIO | None = None
        self._reasoning: list[str] = []

    def add(self, newer: ChoiceOutput) -> None:
        """Merges an output, except for the usage, which the PendingChoice keeps."""
        if self._text is None:
            self._text = io.StringIO()
            self._append(self._text, self._output)
            self._output = _copied(self._output)
        self._append(self._text, newer)
        if isinstance(newer, ChoiceDelta):
            self._output.token_ids.extend(newer.token_ids)
            return
        if isinstance(self._output, ChoiceDelta):
            self._output = GenerateResponse(token_ids=self._output.token_ids)
        self._output.MergeFrom(newer)

    def _append(self, text: io.StringIO, output: ChoiceOutput) -> None:
        text.write(output.text)
        if output.reasoning:
            self._reasoning.append(output.reasoning)

    def read(self) -> ChoiceOutput:
        if self._text is not None:
            # MergeFrom() keeps only the last string.
            self._output.text = self._text.getvalue()
            if not isinstance(self._output, ChoiceDelta):
                self._output.reasoning = "".join(self._reasoning)
        return self._output


def _copied(output: ChoiceOutput) -> ChoiceOutput:
    """Returns an output that may be changed."""
    if isinstance(output, ChoiceDelta):
        return ChoiceDelta("", list(output.token_ids))
    copy = GenerateResponse()
    copy.CopyFrom(output)
    return copy
