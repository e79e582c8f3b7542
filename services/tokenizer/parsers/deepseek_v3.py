"""function<｜tool▁sep｜>name ```json {...}``` between marks: DeepSeek-V3 and R1."""

import re

from pagewire.services.tokenizer.parsers.tool_calls import NAME, HeadedCallReader

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV3Reader(HeadedCallReader):
    opening = (CALLS_BEGIN, CALL_BEGIN)
    closing = ("```", CALL_END, CALLS_END)
    marks = (*opening, CALL_END, CALLS_END, SEPARATOR)
    header = re.compile(rf"\s*(?:{CALL_BEGIN})?\s*\w+\s*{SEPARATOR}\s*({NAME})\s*```(?:json)?\s*")
