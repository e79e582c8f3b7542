"""Calls that a grammar forces: JSON alone, which does not depend on the model's marks.

The grammar admits nothing but calls, so what `max_tokens` cuts off is a beginning of one, never text.
"""

import json
from collections.abc import Callable, Sequence

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.json_calls import JsonCallReader
from pagewire.services.tokenizer.parsers.calls.tool_calls import ToolCallReader

_HEAD = '{"name": "'


class ListedCallReader(JsonCallReader):
    """A list: [{"name": ..., "arguments": {...}}, ...]."""

    opening = ("[",)
    closing = ("]",)
    marks = ()
    separator = ","

    def __init__(self, new_id: Callable[[], str] | None = None, names: Sequence[str] = ()) -> None:
        """names: of the tools that may be called."""
        super().__init__(new_id)
        self._names = names

    def _no_call(self, parsed: Parsed) -> bool:
        begun = (self._unopened + self._held).lstrip("[, \n")
        fitting = [name for name in self._names if self._written(name).startswith(begun)]
        if not self._ended or not fitting:
            return super()._no_call(parsed)
        # It was cut off. One name that fits is the name; of several, there is as much as was written.
        name = fitting[0] if len(fitting) == 1 else begun[len(_HEAD) :].partition('"')[0]
        if name and (begun or not self._num_calls):
            self._open(parsed, name)
        self._unopened = self._held = ""
        self._state = self._text
        return False

    def _close(self) -> bool:
        if self._ended and not self._held.strip(", \n"):
            self._held = ""
        return super()._close()

    @staticmethod
    def _written(name: str) -> str:
        """Returns a call up to its arguments, as the grammar writes it."""
        return f'{_HEAD}{json.dumps(name, ensure_ascii=False)[1:]}, "arguments": '


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
