"""DeepSeek-V3.1: name<｜tool▁sep｜>{...} between marks."""

import re
from collections.abc import Sequence

from pagewire.services.tokenizer.parsers.calls.deepseek_v3 import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from pagewire.services.tokenizer.parsers.calls.tool_calls import NAME, HeadedCallReader, check_names
from pagewire.services.tokenizer.parsers.shared.formats import CallableTool, Format, listed, tag


class DeepSeekV31Reader(HeadedCallReader):
    opening = (CALLS_BEGIN, CALL_BEGIN)
    closing = (CALL_END, CALLS_END)
    marks = (*opening, *closing, SEPARATOR)
    header = re.compile(rf"\s*(?:{CALL_BEGIN})?\s*({NAME})\s*{SEPARATOR}\s*")

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        check_names(tools)
        calls = [tag(f"{CALL_BEGIN}{tool.name}{SEPARATOR}", tool.arguments, CALL_END) for tool in tools]
        return [tag(CALLS_BEGIN, listed(calls, "", only_one=only_one), CALLS_END)]
