"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; newer models [TOOL_CALLS]name[ARGS]{...}."""

import re
import secrets
import string
from collections.abc import Sequence

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.json_calls import JsonCallReader
from pagewire.services.tokenizer.parsers.calls.tool_calls import NAME, check_names
from pagewire.services.tokenizer.parsers.shared.formats import CallableTool, Format, listed, tag

_HEADER = re.compile(rf"\s*({NAME})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_LIST = re.compile(r"\s{0,99}(?:\[|(?=\{))")  # or its only object
_LIST_BEGINNING = re.compile(r"\s{0,99}")
_ID_CHARS = string.ascii_letters + string.digits


class MistralReader(JsonCallReader):
    opening = ("[TOOL_CALLS]",)
    closing = (",]", "]")
    marks = (*opening, "[ARGS]", "[CALL_ID]")
    separator = ","

    def __init__(self) -> None:
        super().__init__()
        self._is_list = False

    @staticmethod
    def new_id() -> str:
        """Returns an id of nine characters: the templates refuse others."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        """Returns tags of both forms: a model writes the one that it was trained on."""
        check_names(tools)
        objects = [tag(f'{{"name": {tool.json_name}, "arguments": ', tool.arguments, "}") for tool in tools]
        return [
            *(tag(f"[TOOL_CALLS]{tool.name}[ARGS]", tool.arguments, "") for tool in tools),
            *(tag(f"[TOOL_CALLS]{space}[", listed(objects, ", ", only_one=only_one), "]") for space in (" ", "")),
        ]

    def _call(self, parsed: Parsed) -> bool:
        if begin := _LIST.match(self._held):
            self._read(begin.end())
            self._is_list, self._state = True, self._object
            return True
        if not self._ended and _LIST_BEGINNING.fullmatch(self._held):
            return False
        self._is_list = False
        return self._headed_call(parsed, _HEADER)

    def _after_arguments(self, parsed: Parsed) -> bool:
        if self._is_list:
            return super()._after_arguments(parsed)
        self._closing_index, self._state = len(self.closing), self._closing
        return True
