"""The streaming steps of a decoder: a joiner turns tokens into text, text steps rewrite it.

Each step holds back text that is not certain yet.
"""

import codecs
from collections.abc import Callable
from typing import Any, Protocol


class Pieces(Protocol):
    """The piece of each token, None if it has no text."""

    def __getitem__(self, token_id: int) -> Any: ...
    def first(self, token_id: int) -> str:
        """Returns the piece of a token at the start of a text."""


class Joiner(Protocol):
    """The first step: turns tokens into text."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...
    def settle(self) -> str:
        """Returns the text that was held back, except for the beginning of a character, which the next tokens may
        complete."""

    def num_held(self, next_id: int | None) -> int:
        """Returns how many characters that are held back come before the text of the token that follows; None: the
        end follows."""

    @property
    def at_start(self) -> bool:
        """Returns whether the next token is shown in another way than in the middle of a text."""


class ByteLevelJoiner:
    """Joins bytes. An incomplete character waits for its other bytes, an impossible one becomes U+FFFD."""

    at_start = False

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not piece:
            return ""
        if piece.isascii() and not self._decoder.buffer:  # as mostly
            return piece.decode()  # type: ignore[no-any-return]
        return self._decoder.decode(piece)

    def flush(self) -> str:
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text

    def settle(self) -> str:
        return ""  # it holds nothing else

    def num_held(self, next_id: int | None) -> int:
        begun: bytes = self._decoder.getstate()[0]
        following = b"" if next_id is None else self._pieces[next_id]
        if not begun or (next_id is not None and not following):
            return 0
        # It is one U+FFFD, unless the next byte continues it.
        try:
            _Utf8Decoder().decode(begun + following[:1], not following)
        except UnicodeDecodeError:
            return 1
        return 0


class ByteFallbackJoiner:
    """Joins pieces that are text, or single bytes as ints (from "<0xE2>").

    A run of bytes is text if all of it is valid UTF-8, and one U+FFFD per byte otherwise: only the token after the
    run, or the end, decides.
    """

    at_start = False

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._run = bytearray()
        # Bytes of the run that were counted, and the characters that begin in these, if the run is valid.
        self._num_counted = self._num_begun = 0

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self.flush() + piece if self._run else piece

    def flush(self) -> str:
        run, self._run = self._run, bytearray()
        self._num_counted = self._num_begun = 0
        return _text_of_run(run)

    def settle(self) -> str:
        decoder = _Utf8Decoder("replace")
        text = decoder.decode(self._run)
        self._run = bytearray(decoder.getstate()[0])
        return text

    def num_held(self, next_id: int | None) -> int:
        if not self._run:
            return 0
        piece = 0 if next_id is None else self._pieces[next_id]
        if isinstance(piece, str) or next_id is None:
            return len(_text_of_run(self._run))
        # Whether the run is valid is not certain yet; mostly it is.
        self._num_begun += sum([not _continues(byte) for byte in self._run[self._num_counted :]])
        self._num_counted = len(self._run)
        return max(0, self._num_begun - (piece is None or _continues(piece)))


class FirstPieceJoiner:
    """Joins text. The first token of all is shown differently from the others."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.at_start = True

    def push(self, token_id: int) -> str:
        piece: str | None = self._pieces[token_id]
        if piece is None:
            return ""
        if self.at_start:
            self.at_start = False
            return self._pieces.first(token_id)
        return piece

    def flush(self) -> str:
        return ""

    def settle(self) -> str:
        return ""

    def num_held(self, next_id: int | None) -> int:
        return 0


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def _continues(byte: int) -> bool:
    """Whether the byte is inside a character of UTF-8, not at its beginning."""
    return byte & 0xC0 == 0x80


def _text_of_run(run: bytearray) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


class TextStep(Protocol):
    """A later step: rewrites text."""

    def push(self, text: str) -> str: ...
    def flush(self) -> str: ...
    @property
    def num_held(self) -> int:
        """Returns the number of characters that are held back."""

    @property
    def at_start(self) -> bool:
        """Returns whether the next text is rewritten in another way than in the middle of a text."""


class StripStart:
    """Removes up to `count` of `char` at the very start."""

    num_held = 0

    def __init__(self, char: str, count: int) -> None:
        self._char, self._left = char, count

    @property
    def at_start(self) -> bool:
        return self._left > 0

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

    at_start = False

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""

    @property
    def num_held(self) -> int:
        return len(self._held)

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
