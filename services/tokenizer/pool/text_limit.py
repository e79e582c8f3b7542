"""How long a text may be. One that is too long is refused by its length, before it is encoded.

Encoding takes a hundred times the text's own memory, and a second per megabyte or two. So a text is held against what
its tokens could be at most, in this order:

1. Bytes. A tokenizer that keeps what it is given writes at most `longest token of the vocabulary, in bytes` per token.
   A normalizer may shrink text before that: canonical and compatibility composition (NFC, NFKC, and SentencePiece's
   tables made of them) by a factor of 4 at most, which the four bytes of a mathematical letter that becomes one show.
   So `most` tokens are never more than

       max(1 MiB, most * longest token * (4 if there is a normalizer, else 1)) bytes.

   What else tokenizers do to text has no bound: they drop white space, accents and control characters, and replace
   words of any length by one unknown token. Of that a text may have what the mebibyte leaves it. A longer one is
   refused even if nearly all of it would be thrown away.
2. Tokens of pieces, where the text is longer than such texts ever are (6 characters per token). Pieces of 64 Ki
   characters are counted until there are more than `most`, so nothing larger is encoded in vain. A cut through a word
   makes a few tokens more than there are; SLACK for each cut makes up for that.

A text of which only one end is wanted is never too long for its rest: the end is taken that has enough tokens. What its
cut does to the tokens beside it is cut off with them.

Chats are held against it when they are rendered: templates leave out what they like.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from pagewire.files.tokenizer_files.loading import LoadedTokenizer

MIN_BYTES = 1024 * 1024
# Characters that are encoded at once before it is known that the text fits.
PIECE = 64 * 1024
# Characters of a token, on average, that no language or program reaches.
_LONG_TOKENS = 6
# Most that composition makes of text, in bytes.
_SHRINKING = 4
# Tokens that a cut may add, or change, beside it.
SLACK = 64


class TextTooLong(ValueError):
    """The message says how long it is and what is possible."""


@dataclass(frozen=True, slots=True)
class Room:
    """What there is room for."""

    most: int  # tokens; 0: not known yet
    keeps: str = "all"  # or "start", "end": that end of a text of any length
    counts: bool = True  # False: its bytes alone are held against it


class TextLimit:
    """Of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def bytes_per_token(self) -> int:
        """Most bytes of text that one token stands for, where none is thrown away."""
        backend = self._tokenizer.backend
        # One character of such a vocabulary is one byte of text.
        is_byte_level = type(backend.decoder).__name__ == "ByteLevel"
        longest = max(len(entry) if is_byte_level else len(entry.encode()) for entry in backend.get_vocab())
        return longest * (_SHRINKING if backend.normalizer is not None else 1)

    def max_bytes(self, most: int) -> int:
        """Of a text of so many tokens."""
        return max(MIN_BYTES, most * self.bytes_per_token)

    def check(self, text: str, room: Room | None) -> None:
        """Raises TextTooLong by the number of its bytes; costs nothing for texts that are not long."""
        if room is None or room.keeps != "all" or 4 * len(text) <= MIN_BYTES:
            return
        size = len(text) if text.isascii() else len(text.encode())
        if size > MIN_BYTES and size > (most := self.max_bytes(room.most)):
            raise self._too_long(room, f"{size} bytes of text, of which {most} are possible")

    def fitted(self, text: str, room: Room | None) -> str:
        """The text, or as much of the wanted end as has the wanted tokens, and some more. Raises TextTooLong."""
        if room is None or len(text) <= (plausible := max(PIECE, _LONG_TOKENS * room.most)):
            return text
        if room.keeps != "all":
            return self._end_of(text, room, plausible)
        self.check(text, room)
        if room.counts:
            self._count(text, room)
        return text

    def _count(self, text: str, room: Room) -> None:
        num_tokens = 0
        for start in range(0, len(text), PIECE):
            num_tokens += self._num_tokens(text[start : start + PIECE]) - SLACK
            if num_tokens > room.most:
                raise self._too_long(room, f"more than {room.most} tokens in its first {start + PIECE} characters")

    def _end_of(self, text: str, room: Room, num_chars: int) -> str:
        """num_chars: to begin with."""
        take: Callable[[int], str] = (lambda n: text[:n]) if room.keeps == "start" else lambda n: text[-n:]
        while num_chars < len(text):
            part = take(num_chars)
            self.check(part, replace(room, keeps="all"))
            if self._num_tokens(part) >= room.most + SLACK:
                return part
            num_chars *= 2
        self.check(text, replace(room, keeps="all"))
        return text

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _too_long(self, room: Room, found: str) -> TextTooLong:
        if not room.most:
            return TextTooLong(f"the prompt has {found} before the model is loaded. Shorten it, or try again later.")
        return TextTooLong(
            f"This model's maximum context length is {room.most} tokens, but the prompt has {found}. Please shorten "
            "the prompt."
        )
