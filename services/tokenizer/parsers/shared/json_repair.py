"""Valid JSON from what models write instead of it: with other quotes, commas too many, or Python's names."""

import json
import re

# Words that JSON does not know. A number that it cannot express is null.
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "undefined": "null",
    **dict.fromkeys(("NaN", "nan", "Infinity", "inf", "-Infinity", "-inf", "+Infinity", "-NaN"), "null"),
}
_LONGEST_WORD = max(map(len, _WORDS))
_WORD = re.compile(r"[\w.+-]+")
# With white space that may come before a bracket. More is not held back, as a model may write it without end.
_MAX_SPACE = 255
_COMMA = re.compile(rf",\s{{0,{_MAX_SPACE}}}")
# In a string: text that JSON takes as it is; an escape; what may become one.
_PLAIN = {quote: re.compile(rf'[^\\{quote}"\x00-\x1f]+') for quote in "\"'"}
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])", re.DOTALL)
_ESCAPE_BEGINNING = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_VALID_ESCAPES = frozenset('"\\/bfnrtu')


class JsonRepair:
    """Repairs a value that arrives in pieces. Valid JSON stays as it was written; what cannot be repaired, too."""

    def __init__(self) -> None:
        self._held = ""
        self._quote = ""  # that began the present string
        self._in_long_word = False

    def push(self, piece: str) -> str:
        """Returns what is certain after this piece."""
        return self._read(piece, ended=False)

    def flush(self, piece: str = "") -> str:
        """Returns the same for the last piece, and all held text."""
        return self._read(piece, ended=True)

    def _read(self, piece: str, *, ended: bool) -> str:
        text, out, at = self._held + piece, [], 0
        while at < len(text):
            step, size = (self._in_string if self._quote else self._outside)(text, at, ended)
            if not size:
                break
            out.append(step)
            at += size
        self._held = text[at:]
        return "".join(out)

    def _outside(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        """Returns the next text and the length that it had; no length if more text must decide."""
        char = text[at]
        if char in "\"'":
            self._quote, self._in_long_word = char, False
            return '"', 1
        if char == ",":
            self._in_long_word = False
            return self._comma(text, at, ended)
        word = _WORD.match(text, at)
        if word is None:
            self._in_long_word = False
            return char, 1
        may_be_known = len(word[0]) <= _LONGEST_WORD and not word[0].lstrip("+-")[:1].isdigit()
        if word.end() == len(text) and may_be_known and not ended and not self._in_long_word:
            return "", 0
        is_whole, self._in_long_word = not self._in_long_word, word.end() == len(text)
        return (_WORDS.get(word[0], word[0]) if is_whole else word[0]), len(word[0])

    def _comma(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        comma = _COMMA.match(text, at)
        assert comma is not None
        end = comma.end()
        if end == len(text) and end - at <= _MAX_SPACE and not ended:
            return "", 0
        is_too_many = text[end : end + 1] in ("}", "]")
        return text[at + is_too_many : end], end - at

    def _in_string(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        char = text[at]
        if char == self._quote:
            self._quote = ""
            return '"', 1
        if plain := _PLAIN[self._quote].match(text, at):
            return plain[0], len(plain[0])
        if char != "\\":
            return json.dumps(char)[1:-1], 1
        if _ESCAPE_BEGINNING.fullmatch(text, at):
            return (text[at:], len(text) - at) if ended else ("", 0)
        escape = _ESCAPE.match(text, at)
        if escape is None:
            return "\\\\", 1
        if escape[0][1] in _VALID_ESCAPES:
            return escape[0], len(escape[0])
        return ("'", 2) if escape[0][1] == "'" else ("\\" + json.dumps(escape[0])[2:-1], 2)


def repaired(text: str) -> str:
    return JsonRepair().flush(text)
