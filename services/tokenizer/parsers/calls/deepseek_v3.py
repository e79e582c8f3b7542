"""DeepSeek-V3 and R1: function<｜tool▁sep｜>name ```json {...}``` between marks."""

import re
from collections.abc import Sequence

from pagewire.services.tokenizer.parsers.calls.tool_calls import NAME, HeadedCallReader, check_names
from pagewire.services.tokenizer.parsers.shared.formats import CallableTool, Format, listed, tag

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV3Reader(HeadedCallReader):
    opening = (CALLS_BEGIN, CALL_BEGIN)
    closing = ("```", CALL_END, CALLS_END)
    marks = (*opening, CALL_END, CALLS_END, SEPARATOR)
    header = re.compile(rf"\s*(?:{CALL_BEGIN})?\s*\w+\s*{SEPARATOR}\s*({NAME})\s*```(?:json)?\s*")

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        check_names(tools)
        calls = [
            tag(f"{CALL_BEGIN}function{SEPARATOR}{tool.name}\n```json\n", tool.arguments, f"\n```{CALL_END}")
            for tool in tools
        ]
        return [tag(CALLS_BEGIN, listed(calls, "\n", only_one=only_one), CALLS_END)]
