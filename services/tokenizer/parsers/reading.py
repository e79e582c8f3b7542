"""Reasoning and tool calls of requests, by the parsers of the model: implements `OutputReading`."""

from collections.abc import Sequence

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.output.reading import OutputReader
from pagewire.services.tokenizer.parsers.call_grammar import grammar_with_calls, tools_of
from pagewire.services.tokenizer.parsers.registry import OutputParsers
from pagewire.services.tokenizer.parsers.structured_outputs import disable_whitespace, leave_out
from pagewire.v1.common_pb2 import SamplingParams
from pagewire.v1.inference_pb2 import GenerateRequest


class ParsedReading:
    """Reads the outputs of one model."""

    def __init__(self, parsers: OutputParsers, *, json_has_whitespace: bool = True) -> None:
        self._parsers = parsers
        self._json_has_whitespace = json_has_whitespace

    def marks(self, request: GenerateRequest) -> frozenset[str]:
        return self._parsers.marks(request.output_parsing)

    def constrain(self, request: GenerateRequest, params: SamplingParams) -> None:
        given = params.grammar if params.HasField("grammar") else None
        if given is not None:
            leave_out(given, request.bad_words)
        if given is not None and not self._json_has_whitespace:
            disable_whitespace(given)
        grammar = grammar_with_calls(request, given, self._parsers)
        if grammar is not None and grammar is not given:
            params.grammar.CopyFrom(grammar)

    def on_prompt(self, request: GenerateRequest, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Says where the reasoning is, if the request has a budget for it or a grammar for what follows it."""
        budget = request.thinking_token_budget if request.HasField("thinking_token_budget") else None
        is_apart = request.output_parsing.reasoning and params.HasField("grammar")
        if params.HasField("thinking") or (budget is None and not is_apart):
            return
        try:
            thinking = self._parsers.thinking(prompt_token_ids, budget)
        except ValueError as error:
            raise invalid(str(error), "thinking_token_budget") from error
        if thinking is not None:
            params.thinking.CopyFrom(thinking)

    def reader(self, request: GenerateRequest, prompt_token_ids: Sequence[int]) -> OutputReader | None:
        return self._parsers.make(request.output_parsing, prompt_token_ids, tools_of(request))
