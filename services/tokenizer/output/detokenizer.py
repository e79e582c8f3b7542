"""Token ids to text, one token at a time, in constant time per token.

`Detokenizer.push(token_id)` returns the text that this token makes certain and `flush()` the rest; together they are
exactly what decoding the whole sequence at once gives. Text is held back while its bytes are incomplete; nothing that
was returned is ever taken back. What was returned depends on nothing but the tokens pushed.

A tokenizer's decoder is a chain of steps over all tokens. It is rebuilt here as a chain of streaming steps: a first
one (a "joiner") that turns tokens into text, then any number that rewrite text.
"""

import codecs
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagewire.files.tokenizer_files.byte_alphabet import CHAR_TO_BYTE
from pagewire.files.tokenizer_files.loading import CLEAN_UPS, LoadedTokenizer


class UnsupportedDecoderError(ValueError):
    """The tokenizer's decoder has a step that cannot be streamed."""


class Detokenizer:
    """Turns one sequence of tokens into text. Made by Detokenizers."""

    __slots__ = ("_joiner", "_steps")

    def __init__(self, joiner: "_Joiner", steps: list["_TextStep"]) -> None:
        self._joiner = joiner
        self._steps = steps

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token; may be empty."""
        text = self._joiner.push(token_id)
        for step in self._steps:
            text = step.push(text)
        return text

    def flush(self) -> str:
        """Returns the text that was held back, as no token follows."""
        text = self._joiner.flush()
        for step in self._steps:
            text = step.push(text) + step.flush()
        return text


class Detokenizers:
    """Makes Detokenizers for one tokenizer. Raises UnsupportedDecoderError at start, not at a request."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        decoder = tokenizer.backend.decoder
        self._plan = _plan(json.loads(decoder.__getstate__()) if decoder else None)
        if tokenizer.clean_up_spaces:
            self._plan.steps += [_replace_all(pattern, content) for pattern, content in CLEAN_UPS]
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._tokenizer = tokenizer
        self._all_pieces = self._lookup(tokenizer, frozenset())
        # Without special tokens except these.
        self._pieces_but_special: dict[frozenset[str], _Lookup] = {}

    def _lookup(self, tokenizer: LoadedTokenizer, skipped: frozenset[int]) -> "_Lookup":
        id_to_token, to_piece = tokenizer.backend.id_to_token, self._plan.to_piece

        def find(token_id: int) -> Any:
            # Ids beyond the vocabulary exist where a model's embedding is padded; decoding leaves them out.
            token = None if token_id in skipped else id_to_token(token_id)
            return None if token is None else to_piece(token)

        return _Lookup(find)

    def make(self, *, skip_special_tokens: bool, but: frozenset[str] = frozenset()) -> Detokenizer:
        """Returns a detokenizer. but: special tokens that are not skipped."""
        if skip_special_tokens:
            pieces = self._pieces_but_special.get(but) or self._pieces_without(but)
        else:
            pieces = self._all_pieces
        return Detokenizer(self._plan.joiner(pieces), [make() for make in self._plan.steps])

    def _pieces_without(self, but: frozenset[str]) -> "_Lookup":
        skipped = frozenset(token_id for text, token_id in self._special.items() if text not in but)
        pieces = self._pieces_but_special[but] = self._lookup(self._tokenizer, skipped)
        return pieces

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's own bytes, special tokens included; b"" for ids that the vocabulary lacks."""
        piece = self._all_pieces[token_id]
        if piece is None:
            return b""
        if isinstance(piece, int):
            return bytes([piece])
        return piece if isinstance(piece, bytes) else piece.encode()

    def token_text(self, token_id: int) -> str:
        """Returns a token's own text, with invalid UTF-8 replaced."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class _Lookup(dict[int, Any]):
    """token id -> piece (None: contributes nothing), found once and then a plain dict access. Shared by requests."""

    def __init__(self, find: Callable[[int], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> Any:
        piece = self[token_id] = self._find(token_id)
        return piece


class _Joiner(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class _ByteLevelJoiner:
    """Pieces are bytes; an incomplete character waits for its other bytes, an impossible one becomes U+FFFD."""

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


class _ByteFallbackJoiner:
    """Pieces are text, or single bytes as ints (from "<0xE2>").

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


class _FirstPieceJoiner:
    """Pieces are text with a leading or inner mark that the first token shows differently from the others."""

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


class _TextStep(Protocol):
    def push(self, text: str) -> str: ...
    def flush(self) -> str: ...


class _StripStart:
    """Leaves out up to `count` of `char` at the very start."""

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


class _ReplaceAll:
    """str.replace over the whole stream: holds back an end that may begin the pattern."""

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


def _replace_all(pattern: str, content: str) -> Callable[[], _TextStep]:
    return lambda: _ReplaceAll(pattern, content)


@dataclass
class _Plan:
    """A tokenizer's decoder as streaming steps."""

    joiner: Callable[[Any], _Joiner]
    # A token as the vocabulary spells it -> the piece that the joiner takes.
    to_piece: Callable[[str], Any]
    steps: list[Callable[[], _TextStep]] = field(default_factory=list)


def _plan(description: dict[str, Any] | None) -> _Plan:
    """From the decoder's own JSON description; None, no decoder, joins tokens by spaces."""
    if description is None:
        return _Plan(lambda pieces: _FirstPieceJoiner(pieces, str, lambda piece: " " + piece), str)
    steps = _flatten(description)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Plan(_ByteLevelJoiner, byte_level_bytes)
    if kinds == ["Metaspace"]:
        return _metaspace_plan(steps[0])
    if kinds == ["WordPiece"]:
        return _word_piece_plan(steps[0])
    return _sentencepiece_plan(steps)


def _flatten(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description["type"] == "Sequence":
        return [step for inner in description["decoders"] for step in _flatten(inner)]
    return [description]


def _metaspace_plan(step: dict[str, Any]) -> _Plan:
    """The mark is a space, but nothing in the first token."""
    mark = step["replacement"]
    in_first = " " if step["prepend_scheme"] == "never" else ""

    def joiner(pieces: Any) -> _Joiner:
        return _FirstPieceJoiner(
            pieces, lambda piece: piece.replace(mark, in_first), lambda piece: piece.replace(mark, " ")
        )

    return _Plan(joiner, str)


# What the WordPiece decoder cleans up in each token, in this order.
_WORD_PIECE_CLEAN_UPS = (*CLEAN_UPS[:6], (" 'm", "'m"), (" do not", " don't"), *CLEAN_UPS[7:])


def _word_piece_plan(step: dict[str, Any]) -> _Plan:
    """A space comes before each token but the first and those that go on with a word, which have a prefix."""
    prefix, cleans_up = step["prefix"], step["cleanup"]

    def shown(piece: str) -> str:
        for pattern, content in _WORD_PIECE_CLEAN_UPS if cleans_up else ():
            piece = piece.replace(pattern, content)
        return piece

    def other(piece: str) -> str:
        return shown(piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}")

    return _Plan(lambda pieces: _FirstPieceJoiner(pieces, shown, other), str)


def _sentencepiece_plan(steps: list[dict[str, Any]]) -> _Plan:
    """[Replace...] [ByteFallback] Fuse [Strip | Replace...]: per token before Fuse, over the whole text after it."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    plan = _Plan(_ByteFallbackJoiner, str)
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if fused:
                plan.steps.append(_replace_all(pattern, content))
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not byte_fallback:
                replacements.append((pattern, content))
            case {"type": "ByteFallback"} if not byte_fallback and not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": char, "start": count, "stop": 0} if fused:
                plan.steps.append(lambda char=char, count=count: _StripStart(char, count))  # type: ignore[misc]
            case _:
                raise UnsupportedDecoderError(
                    f"the tokenizer's decoder cannot be streamed because of its step {json.dumps(step)}; supported "
                    "are ByteLevel, Metaspace, WordPiece, and SentencePiece's Replace, ByteFallback, Fuse, Strip"
                )

    def to_piece(token: str) -> str | int:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        byte = fallback_byte(token) if byte_fallback else None
        return token if byte is None else byte

    plan.to_piece = to_piece
    return plan


def fallback_byte(token: str) -> int | None:
    """Returns the byte that "<0xE2>" stands for; None for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def byte_level_bytes(token: str) -> bytes:
    """Returns the bytes of a token: its own UTF-8 if a character is outside the byte alphabet, as in special tokens."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in token])
    except KeyError:
        return token.encode()
