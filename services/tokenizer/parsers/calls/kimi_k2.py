"""Kimi K2: functions.name:0<|tool_call_argument_begin|>{...} between marks."""

import re
from collections.abc import Sequence

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.tool_calls import HeadedCallReader, check_names
from pagewire.services.tokenizer.parsers.shared.formats import (
    CallableTool,
    Format,
    listed,
    regex_of,
    sequence,
    tag,
    text_of,
)

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiK2Reader(HeadedCallReader):
    opening = (SECTION_BEGIN, CALL_BEGIN)
    closing = (CALL_END, SECTION_END)
    marks = (*opening, *closing, ARGUMENTS)
    header = re.compile(
        rf"\s*(?:{re.escape(CALL_BEGIN)})?\s*((?:functions\.)?([^\s{{}}\[\]<>|:]{{1,128}}):\d{{1,9}})\s*{re.escape(ARGUMENTS)}\s*"
    )

    def _open_headed(self, parsed: Parsed, header: re.Match[str]) -> None:
        """Keeps the call's id as the model wrote it, with the tool's name in it: its templates show that."""
        self._open(parsed, header[2], header[1])

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        check_names(tools)
        calls = [
            tag(
                f"{CALL_BEGIN}functions.{tool.name}:",
                sequence(regex_of("[0-9]{1,4}"), text_of(ARGUMENTS), tool.arguments),
                CALL_END,
            )
            for tool in tools
        ]
        return [tag(SECTION_BEGIN, listed(calls, "", only_one=only_one), SECTION_END)]
