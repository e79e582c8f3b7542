"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen2.5, Qwen3 and many others."""

from pagewire.services.tokenizer.parsers.json_calls import JsonCallReader


class HermesReader(JsonCallReader):
    opening = ("<tool_call>",)
    closing = ("</tool_call>",)
    marks = (*opening, *closing)
