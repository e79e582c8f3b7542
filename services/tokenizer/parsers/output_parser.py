"""The parsers of one request: reasoning first, then tool calls in the rest."""

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.tool_calls import ToolCallReader
from pagewire.services.tokenizer.parsers.shared.reader import ReasoningReader


class OutputParser:
    """Splits the text of one output: an `OutputReader`."""

    def __init__(
        self, reasoning: ReasoningReader | None, tool_calls: ToolCallReader | None, *, first_call_only: bool
    ) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._first_call_only = first_call_only
        self.has_called = False  # and ends for that reason

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning.num_tokens if self._reasoning is not None else 0

    def push(self, *texts: str) -> Parsed:
        """Returns the parts that are certain after these texts, one for each token."""
        parsed = Parsed()
        if self._reasoning is None:
            text = "".join(texts)
        else:
            for text in texts:
                self._reasoning.push_token(text, parsed)
            text, parsed.text = parsed.text, ""
        if self._tool_calls is None:
            parsed.text = text
        elif text:
            self._tool_calls.push(text, parsed)
            self._note_calls(parsed)
        return parsed

    def finish(self, *texts: str, rest: str = "") -> Parsed:
        """Returns the same for the last texts, and all held text. rest: text of these or of earlier tokens."""
        parsed = self.push(*texts)
        if self._reasoning is not None:
            held = Parsed()
            self._reasoning.push(rest, held)
            self._reasoning.flush(held)
            parsed.reasoning += held.reasoning
            rest = held.text
        if self._tool_calls is None:
            parsed.text += rest
        else:
            self._tool_calls.push(rest, parsed)
        if self._tool_calls is not None:
            self._tool_calls.flush(parsed)
            self._note_calls(parsed)
        return parsed

    def _note_calls(self, parsed: Parsed) -> None:
        if self._first_call_only:
            parsed.tool_calls = [delta for delta in parsed.tool_calls if not delta.index]
        if parsed.tool_calls and self._tool_calls is not None:
            self.has_called = self._tool_calls.is_reason_to_end
