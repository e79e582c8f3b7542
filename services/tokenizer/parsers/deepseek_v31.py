"""name<｜tool▁sep｜>{...} between marks: DeepSeek-V3.1."""

import re

from pagewire.services.tokenizer.parsers.deepseek_v3 import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from pagewire.services.tokenizer.parsers.tool_calls import NAME, HeadedCallReader


class DeepSeekV31Reader(HeadedCallReader):
    opening = (CALLS_BEGIN, CALL_BEGIN)
    closing = (CALL_END, CALLS_END)
    marks = (*opening, *closing, SEPARATOR)
    header = re.compile(rf"\s*(?:{CALL_BEGIN})?\s*({NAME})\s*{SEPARATOR}\s*")
