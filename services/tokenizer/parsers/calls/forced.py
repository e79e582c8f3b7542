"""Calls that a grammar forces: JSON alone, which does not depend on the model's marks."""

from collections.abc import Callable

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.json_calls import JsonCallReader
from pagewire.services.tokenizer.parsers.calls.tool_calls import ToolCallReader


class ListedCallReader(JsonCallReader):
    """A list: [{"name": ..., "arguments": {...}}, ...]."""

    opening = ("[",)
    closing = ("]",)
    marks = ()
    separator = ","


class ArgumentsReader(ToolCallReader):
    """The arguments of a call of the tool that the client named."""

    opening = ("{",)
    marks = ()
    is_reason_to_end = False

    def __init__(self, name: str, new_id: Callable[[], str] | None = None) -> None:
        super().__init__(new_id)
        self._name = name

    def _call(self, parsed: Parsed) -> bool:
        self._held = self._unopened.lstrip() + self._held
        self._open(parsed, self._name)
        self._state = self._arguments
        return True
