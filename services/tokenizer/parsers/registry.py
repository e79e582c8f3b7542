"""Parsers by name, and their detection from chat templates.

A new one is a class in its own file, a name here and in `pagewire.config.tokenizer`, and a line in `detect_…` if
its marks differ from all others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagewire.services.tokenizer.parsers.calls.deepseek_v3 import CALLS_BEGIN, DeepSeekV3Reader
from pagewire.services.tokenizer.parsers.calls.deepseek_v31 import DeepSeekV31Reader
from pagewire.services.tokenizer.parsers.calls.forced import ArgumentsReader, ListedCallReader
from pagewire.services.tokenizer.parsers.calls.gpt_oss import GptOssReader
from pagewire.services.tokenizer.parsers.calls.granite import GraniteReader
from pagewire.services.tokenizer.parsers.calls.hermes import HermesReader
from pagewire.services.tokenizer.parsers.calls.kimi_k2 import KimiK2Reader
from pagewire.services.tokenizer.parsers.calls.llama3_json import Llama3JsonReader
from pagewire.services.tokenizer.parsers.calls.mistral import MistralReader
from pagewire.services.tokenizer.parsers.calls.pythonic import PythonicReader
from pagewire.services.tokenizer.parsers.calls.tagged_calls import Glm45Reader, MiniMaxM2Reader, Qwen3CoderReader
from pagewire.services.tokenizer.parsers.calls.tool_calls import ToolCallReader
from pagewire.services.tokenizer.parsers.output_parser import OutputParser
from pagewire.services.tokenizer.parsers.reasoning.harmony import HarmonyReader
from pagewire.services.tokenizer.parsers.reasoning.think import DeepSeekR1Reader, MistralThinkReader, ThinkReader
from pagewire.services.tokenizer.parsers.shared.untyped_values import resolved
from pagewire.v1.common_pb2 import Thinking, TokenSequence
from pagewire.v1.inference_pb2 import OutputParsing, Tool

ReasoningReader = type[ThinkReader] | type[HarmonyReader]

# vLLM's names, some of which mean the same.
TOOL_CALL_PARSERS: Mapping[str, type[ToolCallReader]] = {
    "deepseek_v3": DeepSeekV3Reader,
    "deepseek_v31": DeepSeekV31Reader,
    "glm45": Glm45Reader,
    "glm47": Glm45Reader,
    "gpt_oss": GptOssReader,
    "granite": GraniteReader,
    "hermes": HermesReader,
    "kimi_k2": KimiK2Reader,
    "llama3_json": Llama3JsonReader,
    "llama4_json": Llama3JsonReader,
    "llama4_pythonic": PythonicReader,
    "minimax_m2": MiniMaxM2Reader,
    "mistral": MistralReader,
    "openai": GptOssReader,
    "pythonic": PythonicReader,
    "qwen3_coder": Qwen3CoderReader,
    "qwen3_xml": Qwen3CoderReader,
}
REASONING_PARSERS: Mapping[str, ReasoningReader] = {
    "deepseek_r1": DeepSeekR1Reader,
    "deepseek_v3": ThinkReader,
    "glm45": ThinkReader,
    "gpt_oss": HarmonyReader,
    "kimi_k2": ThinkReader,
    "minimax_m2": ThinkReader,
    "mistral": MistralThinkReader,
    "openai_gptoss": HarmonyReader,
    "qwen3": ThinkReader,
}
# Tokens at the end of a prompt that show how its output begins.
NUM_LAST_TOKENS = 8


def detect_tool_call_parser(template: str) -> str:
    """Returns the name of the parser for the calls that a chat template shows, "none" for unknown calls."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if CALLS_BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<|channel|>" in template and "functions" in template:
        return "gpt_oss"
    if "<|tool_calls_section_begin|>" in template:
        return "kimi_k2"
    if "<minimax:tool_call>" in template:
        return "minimax_m2"
    if "<tool_call>" in template:
        # Three formats have the same marks.
        if "<function=" in template:
            return "qwen3_coder"
        return "glm45" if "<arg_key>" in template else "hermes"
    if "<|tool_call|>" in template:
        return "granite"
    if "<|python_start|>" in template or "[func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '{"name": function name' in template:
        return "llama3_json"
    return "none"


def detect_reasoning_parser(template: str) -> str:
    """Returns the name of the parser for the reasoning that a chat template shows, or "none"."""
    if "<|channel|>" in template:
        return "gpt_oss"
    if "[THINK]" in template:
        return "mistral"
    return "qwen3" if "<think>" in template or "</think>" in template else "none"


def parser_names(tool_call_parser: str, reasoning_parser: str, templates: Sequence[str]) -> tuple[str, str]:
    """Returns the names of both parsers, where "auto" stands for those that the chat templates show."""
    template = "\n".join(templates)
    if tool_call_parser == "auto":
        tool_call_parser = detect_tool_call_parser(template)
    if reasoning_parser == "auto":
        reasoning_parser = detect_reasoning_parser(template)
    return tool_call_parser, reasoning_parser


def _schemas_of_arguments(tool: Tool) -> dict[str, Any]:
    """Returns the schemas by the names of arguments; {} if the tool's schema has none."""
    try:
        schema = json.loads(tool.parameters_json)
    except (ValueError, RecursionError):
        return {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: resolved(one, schema) for name, one in properties.items()}


class OutputParsers:
    """Makes the parsers of a model's outputs."""

    def __init__(
        self,
        tool_call_parser: str,
        reasoning_parser: str,
        *,
        templates: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], list[int]],
    ) -> None:
        """tool_call_parser, reasoning_parser: names, or "none", or "auto" for those that the chat templates show.

        decode: tokens to text, special ones included. encode: a mark to tokens.
        """
        tool_call_parser, reasoning_parser = parser_names(tool_call_parser, reasoning_parser, templates)
        self.tool_call_parser, self.reasoning_parser = tool_call_parser, reasoning_parser
        self.call_reader = TOOL_CALL_PARSERS.get(tool_call_parser)  # None: the format of calls is not known
        self._reasoning = REASONING_PARSERS.get(reasoning_parser)
        self._decode = decode
        # If a mark is not a token, these are the tokens that models usually write for it.
        marks = {} if self._reasoning is None else self._reasoning.thinking_marks()
        self._thinking_marks = {name: TokenSequence(token_ids=encode(mark)) for name, mark in marks.items()}

    @property
    def reasoning_marks(self) -> Sequence[str]:
        return () if self._reasoning is None else self._reasoning.marks

    def marks(self, parsing: OutputParsing) -> frozenset[str]:
        """Returns the special tokens that the parsers of a request must see."""
        readers = (parsing.reasoning and self._reasoning, parsing.tool_calls and self.call_reader)
        return frozenset(mark for reader in readers if reader for mark in reader.marks)

    def makes_one_call(self, parsing: OutputParsing) -> bool:
        """Returns whether an output has at most one call."""
        if parsing.HasField("first_tool_call_only"):
            return parsing.first_tool_call_only
        # A model that was never trained to call adds calls to a required one until max_tokens.
        return self.call_reader is None and parsing.WhichOneof("forced") is not None

    def make(
        self, parsing: OutputParsing, prompt_token_ids: Sequence[int], tools: Sequence[Tool] = ()
    ) -> OutputParser | None:
        """Returns a parser for one output; None if there is nothing to parse. tools: those that may be called."""
        reasoning = self._reasoning if parsing.reasoning else None
        tool_calls = self._make_call_reader(parsing, tools)
        if tool_calls is not None and tool_calls.reads_schemas:
            tool_calls.schemas = {tool.name: _schemas_of_arguments(tool) for tool in tools}
        if reasoning is None and tool_calls is None:
            return None
        return OutputParser(
            reasoning(self._prompt_end(prompt_token_ids)) if reasoning is not None else None,
            tool_calls,
            first_call_only=self.makes_one_call(parsing),
        )

    def thinking(self, prompt_token_ids: Sequence[int], budget: int | None) -> Thinking | None:
        """Returns the marks and the budget of the reasoning; None if there is none.

        Raises ValueError for a budget without a parser.
        """
        if self._reasoning is None:
            if budget is not None:
                raise ValueError(
                    "thinking_token_budget needs the marks around the model's reasoning, which its chat template does "
                    "not show; start the server with --reasoning-parser"
                )
            return None
        reader = self._reasoning(self._prompt_end(prompt_token_ids))
        if not reader.may_reason:
            return None
        return Thinking(**self._thinking_marks, begun=reader.reasons, budget=budget)

    def _prompt_end(self, token_ids: Sequence[int]) -> str:
        """Returns the end of the prompt, from its tokens: a resumed request has no text."""
        return self._decode(token_ids[-NUM_LAST_TOKENS:])

    def _make_call_reader(self, parsing: OutputParsing, tools: Sequence[Tool]) -> ToolCallReader | None:
        new_id = None if self.call_reader is None else self.call_reader.new_id
        match parsing.WhichOneof("forced"):
            case "required":
                return ListedCallReader(new_id, [tool.name for tool in tools])
            case "named":
                return ArgumentsReader(parsing.named, new_id)
        return self.call_reader() if self.call_reader is not None and parsing.tool_calls else None
