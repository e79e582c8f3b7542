"""Granite 3 and Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]."""

import re
from collections.abc import Sequence

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.json_calls import JsonCallReader
from pagewire.services.tokenizer.parsers.shared.formats import CallableTool, Format, listed, tag

_LIST = re.compile(r"\s{0,99}(?:\[|(?=\{))")  # or its only object
_LIST_BEGINNING = re.compile(r"\s{0,99}")


class GraniteReader(JsonCallReader):
    opening = ("<|tool_call|>", "<tool_call>")
    closing = (",]", "]", "<|/tool_call|>", "</tool_call>")
    marks = ("<|tool_call|>", "<|/tool_call|>", "<tool_call>", "</tool_call>")
    separator = ","

    def _call(self, parsed: Parsed) -> bool:
        self._state = self._call
        if begin := _LIST.match(self._held):
            self._read(begin.end())
            self._state = self._object
            return True
        return self._wait_or_leave(parsed, _LIST_BEGINNING)

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        calls = [tag(f'{{"name": {tool.json_name}, "arguments": ', tool.arguments, "}") for tool in tools]
        return [
            tag(opening, listed(calls, ", ", only_one=only_one), "]") for opening in ("<|tool_call|>[", "<tool_call>[")
        ]
