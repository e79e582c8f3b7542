"""The tool calls of an output, put together from their deltas."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from pagewire.v1.inference_pb2 import ToolCallDelta


class WholeCall(NamedTuple):
    """A tool call. `arguments` as the model wrote them: JSON, unless it failed or was cut off."""

    id: str
    name: str
    arguments: str


def whole_calls(deltas: Iterable[ToolCallDelta]) -> list[WholeCall]:
    """Returns the calls of a whole output, in order."""
    calls = []
    for _, group in groupby(deltas, key=lambda delta: delta.index):
        of_call = list(group)
        calls.append(WholeCall(of_call[0].id, of_call[0].name, "".join([delta.arguments for delta in of_call])))
    return calls
