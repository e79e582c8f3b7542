"""Reasoning between marks, before the answer: <think>reasoning</think>answer."""

from typing import ClassVar

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.shared.reader import MAX_SPACE, ReasoningReader, len_of_space


class ThinkReader(ReasoningReader):
    """Qwen3, DeepSeek-V3.1 and others: the prompt opens the reasoning, or the output begins with the mark."""

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    marks = (opening, closing)
    # Whether an output reasons if neither the prompt nor the output has the mark.
    reasons_by_default: ClassVar[bool] = False

    def __init__(self, prompt_end: str) -> None:
        """prompt_end: the last characters of the prompt, special tokens included."""
        super().__init__()
        prompt_end = prompt_end.rstrip()
        self.reasons = self.reasons_by_default or prompt_end.endswith(self.opening)
        if prompt_end.endswith(self.closing):
            self.reasons = self.may_reason = False
            self._state = self._answer

    @classmethod
    def thinking_marks(cls) -> dict[str, str]:
        return {"start": cls.opening, "end": cls.closing}

    def _start(self, parsed: Parsed) -> bool:
        rest = self._held.lstrip()
        if len(self._held) - len(rest) > MAX_SPACE:
            self._state = self._reasoning_begin if self.reasons else self._answer
            return True
        if rest.startswith(self.opening):
            self._held = rest[len(self.opening) :]
            self.reasons = True
            self.num_tokens = 0
        elif self.opening.startswith(rest) and not self._ended:
            return False
        self._state = self._reasoning_begin if self.reasons else self._answer
        return True

    def _reasoning_begin(self, parsed: Parsed) -> bool:
        self._held = self._held.lstrip()
        self._state = self._reasoning if self._held else self._reasoning_begin
        return bool(self._held)

    def _reasoning(self, parsed: Parsed) -> bool:
        end = self._held.find(self.closing)
        if end == -1:
            parsed.reasoning += self._take_certain((self.closing,))
            return False
        parsed.reasoning += self._held[: end - len_of_space(self._held[:end])]
        self._held = self._held[end + len(self.closing) :]
        self.reasons = self.may_reason = False
        self.num_tokens -= 1
        self._state = self._answer_begin
        return True

    def _answer_begin(self, parsed: Parsed) -> bool:
        self._held = self._held.lstrip()
        self._state = self._answer if self._held else self._answer_begin
        return bool(self._held)

    def _answer(self, parsed: Parsed) -> bool:
        parsed.text += self._take(len(self._held))
        return False


class DeepSeekR1Reader(ThinkReader):
    """DeepSeek-R1: all text up to </think> is reasoning, with or without an opening mark."""

    reasons_by_default = True


class MistralThinkReader(ThinkReader):
    """Mistral's Magistral: other marks."""

    opening = "[THINK]"
    closing = "[/THINK]"
    marks = (opening, closing)
