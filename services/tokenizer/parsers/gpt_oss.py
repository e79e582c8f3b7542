"""Messages on the commentary channel to functions.name: GPT-OSS."""

import re

from pagewire.services.tokenizer.parsers.tool_calls import NAME, HeadedCallReader


class GptOssReader(HeadedCallReader):
    opening = ("<|channel|>commentary to=functions.",)
    closing = ("<|call|>",)
    marks = ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")
    header = re.compile(rf"({NAME})[^{{]*?<\|message\|>\s*")
