"""The tokens that write a banned word, at the beginning of a word and inside one."""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.services.tokenizer.pool.infill import SPACES


def token_sequences(tokenizer: LoadedTokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns up to two sequences for each word, without repetitions: with a space before it, and without."""
    bare = dict.fromkeys(word.lstrip() or word for word in words)
    unknown = tokenizer.special_tokens.get("unk_token", "")
    unknown_id = tokenizer.backend.token_to_id(unknown)
    found = (
        tuple(token_ids)
        for word in bare
        for token_ids in _forms(tokenizer, word)
        # A word that the vocabulary cannot write needs no ban, and its token stands for others too.
        if unknown_id not in token_ids or unknown in word
    )
    return [list(token_ids) for token_ids in dict.fromkeys(found) if token_ids]


def _forms(tokenizer: LoadedTokenizer, word: str) -> Iterator[list[int]]:
    backend = tokenizer.backend
    plain = tokenizer.encode(word, add_special_tokens=False)
    if type(backend.model).__name__ == "WordPiece":  # a piece without a mark begins a word
        yield plain
        yield _inside_by_word_pieces(backend, word)
    elif plain and (backend.id_to_token(plain[0]) or "").startswith(SPACES):  # the tokenizer has added a space
        yield _inside(backend, word)
        yield plain
    else:
        yield plain
        yield tokenizer.encode(" " + word, add_special_tokens=False)


def _inside(backend: Tokenizer, word: str) -> list[int]:
    """Returns the tokens of a word without the space that the tokenizer adds."""
    first, *others = _split(backend, word)
    for mark in SPACES:
        first = first.removeprefix(mark)
    return [token.id for piece in (first, *others) if piece for token in backend.model.tokenize(piece)]


def _inside_by_word_pieces(backend: Tokenizer, word: str) -> list[int]:
    """Returns the pieces that continue another word, of which each is the longest that fits; none if there are none."""
    first, *others = _split(backend, word)
    model, token_ids, start = backend.model, [], 0
    if len(first) > model.max_input_chars_per_word:
        return []
    while start < len(first):
        ends = range(len(first), start, -1)
        spelled = ((end, model.token_to_id(model.continuing_subword_prefix + first[start:end])) for end in ends)
        start, token_id = next(((end, found) for end, found in spelled if found is not None), (start, None))
        if token_id is None:
            return []
        token_ids.append(token_id)
    return token_ids + [token.id for piece in others for token in model.tokenize(piece)]


def _split(backend: Tokenizer, text: str) -> list[str]:
    """Returns the pieces that the model of the tokenizer turns into tokens, at least one."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] or [""]
