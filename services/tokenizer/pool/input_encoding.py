"""Encodes texts and pairs of texts for models of vectors; long ones may be cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from pagewire.services.tokenizer.pool.text_limit import Room

# Token ids, and the place where the second text of a pair begins (0: none, or the model does not distinguish).
EncodedInput = tuple[list[int], int]


@dataclass(frozen=True)
class Cuts:
    """The numbers of tokens that are kept of longer texts; None: all."""

    whole: int | None = None  # including special tokens; the longer text of a pair is cut first
    first: int | None = None  # the first text, or the only one, without special tokens
    second: int | None = None  # the second text of a pair
    from_start: bool = False  # `whole` cuts off the beginning of a text, not its end
    max_tokens: int | None = None  # of a text that is not cut; None: not known

    @property
    def cuts_anything(self) -> bool:
        """True if there is a limit that cuts."""
        return (self.whole, self.first, self.second) != (None, None, None)

    def room(self, *, is_second: bool) -> Room | None:
        """Returns how much of a text must be encoded to get the same result after these cuts."""
        own = self.second if is_second else self.first
        if own is not None:
            # `whole` may keep the end of this beginning.
            return Room(own, keeps="start")
        if self.whole is not None:
            return Room(self.whole, keeps="end" if self.from_start else "start")
        return None if self.max_tokens is None else Room(self.max_tokens)


NO_CUTS = Cuts()


def encode_inputs(
    backend: Tokenizer, texts: Sequence[tuple[str, str | None]], *, add_special_tokens: bool, cuts: Cuts = NO_CUTS
) -> list[EncodedInput]:
    """Encodes texts and pairs. Raises ValueError if special tokens leave no room for a text."""
    if not cuts.cuts_anything:
        whole = [text if pair is None else (text, pair) for text, pair in texts]
        encodings = backend.encode_batch(whole, add_special_tokens=add_special_tokens)
    else:
        encodings = _cut(backend, texts, add_special_tokens, cuts)
    return [(encoding.ids, _second_text_start(encoding)) for encoding in encodings]


def _cut(
    backend: Tokenizer, texts: Sequence[tuple[str, str | None]], add_special_tokens: bool, cuts: Cuts
) -> list[Encoding]:
    firsts = backend.encode_batch([text for text, _ in texts], add_special_tokens=False)
    pairs = [pair for _, pair in texts if pair is not None]
    seconds = iter(backend.encode_batch(pairs, add_special_tokens=False))
    encodings = []
    for first, (_, pair) in zip(firsts, texts, strict=True):
        second = None if pair is None else next(seconds)
        if cuts.first is not None:
            first.truncate(cuts.first)
        if second is not None and cuts.second is not None:
            second.truncate(cuts.second)
        if cuts.whole is not None:
            num_special = backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            _cut_whole(first, second, cuts.whole, num_special, "left" if cuts.from_start else "right")
        encodings.append(backend.post_process(first, second, add_special_tokens))
    return encodings


def cut(token_ids: list[int], cuts: Cuts) -> list[int]:
    """Cuts a text that was given as tokens."""
    if cuts.whole is None:
        return token_ids
    return token_ids[-cuts.whole :] if cuts.from_start else token_ids[: cuts.whole]


def _cut_whole(first: Encoding, second: Encoding | None, max_tokens: int, num_special: int, direction: str) -> None:
    """direction: the end that is cut off."""
    room = max_tokens - num_special
    if room < 1:
        raise ValueError(
            f"truncate_prompt_tokens is {max_tokens}, which leaves no room for a text with special tokens; raise it"
        )
    if second is None:
        first.truncate(room, direction=direction)
    elif len(first) + len(second) > room:
        first_room, second_room = _rooms(len(first), len(second), room)
        first.truncate(first_room, direction=direction)
        second.truncate(second_room, direction=direction)


def _rooms(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns what is kept of two lengths that exceed the room: the longer is cut until both are equal, then both (the
    library's longest_first)."""
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


def _second_text_start(encoding: Encoding) -> int:
    types = encoding.type_ids
    return types.index(1) if 1 in types else 0
