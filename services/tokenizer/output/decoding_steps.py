"""The streaming steps of a decoder: a joiner turns tokens into text, text steps rewrite it.

Each step holds back text that is not certain yet.
"""

import codecs
from collections.abc import Callable
from typing import Protocol


class Joiner(Protocol):
    """The first step: turns tokens into text."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class ByteLevelJoiner:
    """Joins bytes. An incomplete character waits for its other bytes, an impossible one becomes U+FFFD."""

    def __init__(self, pieces: dict[int, bytes | None]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        return self._decoder.decode(piece) if piece else ""

    def flush(self) -> str:
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


class ByteFallbackJoiner:
    """Joins pieces that are text, or single bytes as ints (from "<0xE2>").

    A run of bytes is text if all of it is valid UTF-8, and one U+FFFD per byte otherwise: only the token after the
    run, or the end, decides.
    """

    def __init__(self, pieces: dict[int, str | int | None]) -> None:
        self._pieces = pieces
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self.flush() + piece if self._run else piece

    def flush(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


class FirstPieceJoiner:
    """Joins text with a leading or inner mark, which the first token shows differently from the others."""

    def __init__(self, pieces: dict[int, str | None], first: Callable[[str], str], other: Callable[[str], str]) -> None:
        self._pieces = pieces
        self._show = first
        self._other = other

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        text, self._show = self._show(piece), self._other
        return text

    def flush(self) -> str:
        return ""


class TextStep(Protocol):
    """A later step: rewrites text."""

    def push(self, text: str) -> str: ...
    def flush(self) -> str: ...


class StripStart:
    """Removes up to `count` of `char` at the very start."""

    def __init__(self, char: str, count: int) -> None:
        self._char, self._left = char, count

    def push(self, text: str) -> str:
        if not self._left or not text:
            return text
        stripped = text[: self._left].lstrip(self._char) + text[self._left :]
        num_stripped = len(text) - len(stripped)
        self._left = self._left - num_stripped if num_stripped == len(text) else 0
        return stripped

    def flush(self) -> str:
        return ""


class ReplaceAll:
    """Replaces as str.replace does over the whole stream. Holds back an end that may begin the pattern."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""

    def push(self, text: str) -> str:
        *done, last = (self._held + text).split(self._pattern)
        size = min(len(last), len(self._pattern) - 1)
        while size and not self._pattern.startswith(last[-size:]):
            size -= 1
        self._held = last[len(last) - size :]
        return self._content.join([*done, last[: len(last) - size]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def replace_all(pattern: str, content: str) -> Callable[[], TextStep]:
    """Returns a function that makes the step."""
    return lambda: ReplaceAll(pattern, content)
