"""Hermes, Qwen2.5, Qwen3 and many others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Sequence

from pagewire.services.tokenizer.parsers.calls.json_calls import JsonCallReader
from pagewire.services.tokenizer.parsers.shared.formats import CallableTool, Format, tag


class HermesReader(JsonCallReader):
    opening = ("<tool_call>",)
    closing = (",]", "]", "```", "</tool_call>")
    marks = (*opening, "</tool_call>")
    separator = ","
    separator_is_optional = True
    between = "\n"

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        return [
            tag(f'<tool_call>\n{{"name": {tool.json_name}, "arguments": ', tool.arguments, "}\n</tool_call>")
            for tool in tools
        ]
