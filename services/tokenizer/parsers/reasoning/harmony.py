"""The messages of GPT-OSS: those on the analysis channel are reasoning, others without a recipient are text.

A message to a tool stays text, with its header in the form that the parser of tool calls reads.
"""

import re

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.shared.reader import MAX_SPACE, ReasoningReader, len_of_beginning

MAX_HEADER = 512

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_BODY = "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
# Beginnings of a message, after the prompt's <|start|>assistant or of a later message.
_HEADERS = ("<|channel|>", "<|start|>", "to=", _BODY)


class HarmonyReader(ReasoningReader):
    """Reads the messages of one output."""

    marks = (*_ENDS, _BODY, "<|constrain|>")

    def __init__(self, prompt_end: str) -> None:
        super().__init__()
        self._recipient = ""
        # Messages of one kind that follow each other become paragraphs.
        self._emitted: set[bool] = set()
        self._is_new = False  # no part of this message was returned

    @classmethod
    def thinking_marks(cls) -> dict[str, str]:
        answer = "<|channel|>final<|message|>"
        return {
            "start": "<|channel|>analysis<|message|>",
            "end": "<|end|>",
            "answer": answer,
            "closing": f"<|end|><|start|>assistant{answer}",
        }

    def _start(self, parsed: Parsed) -> bool:
        return self._header(parsed)

    def _header(self, parsed: Parsed) -> bool:
        self._state = self._header
        rest = self._held.lstrip()
        if len(self._held) - len(rest) > MAX_SPACE:
            return self._begin("", "final")
        if not rest:
            return False
        if not any(rest.startswith(begin) for begin in _HEADERS):
            if any(begin.startswith(rest) for begin in _HEADERS) and not self._ended:
                return False
            return self._begin("", "final")
        end = self._held.find(_BODY)
        if end == -1 and len(self._held) <= MAX_HEADER and not self._ended:
            return False
        if not 0 <= end <= MAX_HEADER:
            return self._no_header(parsed, rest)
        header = self._take(end + len(_BODY))
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            parsed.text += f"<|channel|>commentary to={recipient[1]}<|message|>"
        return self._begin(recipient[1] if recipient else "", channel[1] if channel else "final")

    def _no_header(self, parsed: Parsed, rest: str) -> bool:
        """Makes a header that is too long text; one that the output's end cuts off too, unless it has only marks."""
        if self._ended and rest.startswith("<|"):
            self._held = ""
            return False
        self._begin("", "final")
        mark = next((mark for mark in _ENDS if rest.startswith(mark)), "")
        self._emit(parsed, self._take(len(self._held) - len(rest) + len(mark)))
        return True

    def _begin(self, recipient: str, channel: str) -> bool:
        self._recipient = recipient
        self.reasons = channel == "analysis" and not recipient
        self._is_new = True
        self._state = self._body
        return True

    def _body(self, parsed: Parsed) -> bool:
        end = _END.search(self._held)
        if end is None:
            held_back = 0 if self._ended else max(len_of_beginning(self._held, mark) for mark in _ENDS)
            self._emit(parsed, self._take(len(self._held) - held_back))
            return False
        self._emit(parsed, self._take(end.start()))
        if end[0] not in ("<|start|>", "<|channel|>"):
            self._take(len(end[0]))
        self.num_tokens -= self.reasons
        self.reasons = False
        if self._recipient:
            parsed.text += "<|call|>"
        self._state = self._header
        return True

    def _emit(self, parsed: Parsed, text: str) -> None:
        if not text:
            return
        if self._is_new and not self._recipient and self.reasons in self._emitted:
            text = f"\n{text}"
        self._is_new = False
        if self.reasons:
            parsed.reasoning += text
        else:
            parsed.text += text
        if not self._recipient:
            self._emitted.add(self.reasons)
