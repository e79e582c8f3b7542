"""The parsers of one request, one behind the other: reasoning first, tool calls in what is left."""

from pagewire.services.tokenizer.parsers.reader import Parsed, Reader
from pagewire.services.tokenizer.parsers.tool_calls import ToolCallReader


class OutputParser:
    """Text of one output in, what it says out."""

    def __init__(self, reasoning: Reader | None, tool_calls: ToolCallReader | None, *, first_call_only: bool) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._first_call_only = first_call_only
        self.has_called = False  # and ends for that

    def push(self, text: str) -> Parsed:
        """What is certain with this text."""
        parsed = Parsed()
        if self._reasoning is not None:
            self._reasoning.push(text, parsed)
            text, parsed.text = parsed.text, ""
        if self._tool_calls is None:
            parsed.text = text
        elif text:
            self._tool_calls.push(text, parsed)
            self._note_calls(parsed)
        return parsed

    def finish(self, text: str) -> Parsed:
        """The same, of the last text, with all that was held back."""
        parsed = self.push(text)
        if self._reasoning is not None:
            rest = Parsed()
            self._reasoning.flush(rest)
            parsed.reasoning += rest.reasoning
            if self._tool_calls is None:
                parsed.text += rest.text
            else:
                self._tool_calls.push(rest.text, parsed)
        if self._tool_calls is not None:
            self._tool_calls.flush(parsed)
            self._note_calls(parsed)
        return parsed

    def _note_calls(self, parsed: Parsed) -> None:
        if self._first_call_only:
            parsed.tool_calls = [delta for delta in parsed.tool_calls if not delta.index]
        if parsed.tool_calls and self._tool_calls is not None:
            self.has_called = self._tool_calls.is_reason_to_end
