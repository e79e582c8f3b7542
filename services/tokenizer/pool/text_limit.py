"""The limit of a text's length. A text that is too long is refused by its length, before it is encoded.

Encoding takes a hundred times the text's own memory, and a second per megabyte or two. So the length of a text is
compared with the most that its tokens can stand for, in this order:

1. Bytes. A tokenizer that keeps all text covers at most `longest token of the vocabulary, in bytes` per token.
   A normalizer may shrink text before that: canonical and compatibility composition (NFC, NFKC, and SentencePiece's
   tables made of them) by a factor of at most 4: a mathematical letter of four bytes becomes one byte.
   So `most` tokens are never more than

       max(1 MiB, most * longest token * (4 if there is a normalizer, else 1)) bytes.

   Other changes have no bound: tokenizers drop white space, accents and control characters, and replace words of any
   length by one unknown token. The mebibyte leaves some room for that. A longer text is refused even if the tokenizer
   would drop nearly all of it.
2. Tokens of pieces, if the text is longer than real texts of `most` tokens (6 characters per token). The tokens of
   pieces of 64 Ki characters are counted until there are more than `most`, so nothing larger is encoded in vain. A cut
   through a word adds a few tokens; SLACK for each cut allows for them.

A text of which only one end is kept is never too long: only enough of that end is encoded. Tokens that change next to
the cut are removed later.

Chats are checked after they are rendered, as templates may leave out parts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer

MIN_BYTES = 1024 * 1024
# Characters that are encoded at once before it is known that the text fits.
PIECE = 64 * 1024
# Characters per token that no language or program reaches on average.
_LONG_TOKENS = 6
# The most that composition shrinks text, in bytes.
_SHRINKING = 4
# Tokens that a cut may add or change next to it.
SLACK = 64


class TextTooLong(ValueError):
    """A text is too long; the message has its length and the limit."""


@dataclass(frozen=True, slots=True)
class Room:
    """The limit of a text's tokens."""

    most: int  # tokens; 0: not known yet
    keeps: str = "all"  # or "start", "end": keeps that end of a text of any length
    counts: bool = True  # False: only its bytes are checked


class TextLimit:
    """Checks texts for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def bytes_per_token(self) -> int:
        """The most bytes of text that one token can stand for, if the tokenizer drops none."""
        backend = self._tokenizer.backend
        # One character of such a vocabulary is one byte of text.
        is_byte_level = type(backend.decoder).__name__ == "ByteLevel"
        longest = max(len(entry) if is_byte_level else len(entry.encode()) for entry in backend.get_vocab())
        return longest * (_SHRINKING if backend.normalizer is not None else 1)

    def max_bytes(self, most: int) -> int:
        """Returns the most bytes of a text of `most` tokens."""
        return max(MIN_BYTES, most * self.bytes_per_token)

    def check(self, text: str, room: Room | None) -> None:
        """Checks the number of bytes, at no cost for texts that are not long. Raises TextTooLong."""
        if room is None or room.keeps != "all" or 4 * len(text) <= MIN_BYTES:
            return
        size = len(text) if text.isascii() else len(text.encode())
        if size > MIN_BYTES and size > (most := self.max_bytes(room.most)):
            raise self._too_long(room, f"{size} bytes of text, of which at most {most} are possible")

    def fitted(self, text: str, room: Room | None) -> str:
        """Returns the text, or enough of the kept end for the wanted tokens and some more. Raises TextTooLong."""
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
        """num_chars: characters to begin with."""
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
            return TextTooLong(
                f"the prompt has {found} while the model is not loaded; shorten the prompt, or try again later"
            )
        return TextTooLong(
            f"This model's maximum context length is {room.most} tokens, but the prompt has {found}. Please shorten "
            "the prompt."
        )
