"""Token ids to text, one token at a time, in constant time per token.

`Detokenizer.push(token_id)` returns the text that this token makes certain and `flush()` the rest; together they are
exactly what decoding the whole sequence at once gives. Text is held back while its bytes are incomplete; returned
text is never taken back. The returned text depends only on the pushed tokens, and on those before them, which
`follow()` takes: the first word of an output begins with a space if a prompt comes before it.

A tokenizer's decoder is a chain of steps over all tokens. It is rebuilt here as a chain of streaming steps: a first
one (a "joiner") that turns tokens into text, then any number that rewrite text.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from pagewire.files.tokenizer_files.loaded_tokenizer import CLEAN_UPS, LoadedTokenizer
from pagewire.services.tokenizer.output.decoder_plan import plan_of
from pagewire.services.tokenizer.output.decoding_steps import Joiner, TextStep, replace_all

# A character has at most four bytes. The tokens of its first three are among these, whatever has no text among them.
_NUM_LAST = 8


class Detokenizer:
    """Turns one sequence of tokens into text. Made by Detokenizers."""

    __slots__ = ("_joiner", "_steps")

    def __init__(self, joiner: Joiner, steps: list[TextStep]) -> None:
        self._joiner = joiner
        self._steps = steps

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens before the first one that is pushed.

        Their text is not returned: the text of the pushed tokens is what remains of the text of all after theirs. A
        character is returned whole if its last bytes are pushed.
        """
        num_taken = 0
        for token_id in token_ids:  # until the first of them that has text
            if not self._joiner.at_start and not any(step.at_start for step in self._steps):
                break
            self.push(token_id)
            num_taken += 1
        for token_id in token_ids[max(num_taken, len(token_ids) - _NUM_LAST) :]:
            self.push(token_id)
        text = self._joiner.settle()
        for step in self._steps:
            text = step.push(text) + step.flush()

    def num_held(self, next_id: int | None) -> int:
        """Returns how many characters are held back that come before the text of the token that follows; None: no
        token follows."""
        num_held = self._joiner.num_held(next_id)
        for step in self._steps:
            num_held += step.num_held
        return num_held

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
        self._plan = plan_of(json.loads(decoder.__getstate__()) if decoder else None)
        if tokenizer.clean_up_spaces:
            self._plan.steps += [replace_all(pattern, content) for pattern, content in CLEAN_UPS]
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._tokenizer = tokenizer
        self._all_pieces = self._lookup(tokenizer, frozenset())
        # Pieces without special tokens, except for those in the key.
        self._pieces_but_special: dict[frozenset[str], _Lookup] = {}

    def _lookup(self, tokenizer: LoadedTokenizer, skipped: frozenset[int]) -> "_Lookup":
        id_to_token, to_piece = tokenizer.backend.id_to_token, self._plan.to_piece
        to_first_piece = self._plan.to_first_piece or to_piece

        def find(token_id: int) -> Any:
            # Ids beyond the vocabulary exist where a model's embedding is padded; decoding leaves them out.
            token = None if token_id in skipped else id_to_token(token_id)
            return None if token is None else to_piece(token)

        def find_first(token_id: int) -> str:
            return to_first_piece(id_to_token(token_id) or "")

        return _Lookup(find, find_first)

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
        """Returns a token's own bytes, as they are inside a text, special tokens included; b"" for ids that the
        vocabulary lacks."""
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
    """A cache: token id -> piece (None: no text). Shared by requests."""

    def __init__(self, find: Callable[[int], Any], find_first: Callable[[int], str]) -> None:
        super().__init__()
        self._find = find
        self.first = find_first

    def __missing__(self, token_id: int) -> Any:
        piece = self[token_id] = self._find(token_id)
        return piece
