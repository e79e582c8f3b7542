"""GPT-OSS: messages on the commentary channel to functions.name."""

import re
from collections.abc import Sequence

from pagewire.services.tokenizer.parsers.calls.tool_calls import NAME, HeadedCallReader, check_names
from pagewire.services.tokenizer.parsers.shared.formats import (
    CallableTool,
    Format,
    any_number_of,
    any_text_but,
    one_of,
    sequence,
    tag,
    text_of,
)


class GptOssReader(HeadedCallReader):
    opening = ("<|channel|>commentary to=functions.",)
    closing = ("<|call|>",)
    marks = ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")
    format_has_reasoning = True
    header = re.compile(rf"({NAME})[^{{]*?<\|message\|>\s*")

    @classmethod
    def output_format(
        cls,
        tools: Sequence[CallableTool],
        *,
        only_one: bool,
        answer: Format | None = None,
        excludes: Sequence[str] = (),
    ) -> Format:
        """Returns the format of all messages, reasoning included: the last one is the answer, or a call."""
        check_names(tools)
        text = any_text_but(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"))
        next_message = text_of("<|start|>assistant")
        before = [tag(f"<|channel|>{channel}<|message|>", text, "<|end|>") for channel in ("analysis", "commentary")]
        last = [
            tag("<|channel|>final<|message|>", text if answer is None else answer, ""),
            *(
                tag(f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>", tool.arguments, "")
                for tool in tools
            ),
        ]
        return sequence(any_number_of(sequence(one_of(*before), next_message)), one_of(*last))
