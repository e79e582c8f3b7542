"""The operator's defaults for the form of outputs: --structured-outputs-config."""

import re
from collections.abc import Sequence

from pagewire.services.tokenizer.errors import invalid
from pagewire.v1.common_pb2 import Grammar

# A word of a script that separates words. Words of other scripts are found wherever they stand, as phrases are.
_WORD = re.compile(r"[^\W_\u0e00-\u1dff\u2000-\U0010ffff]+")
_SEARCH_CHARS = 32  # which take as long as the beginning of a search
_MAX_SEARCHED = 2**24  # characters, for all phrases together


def leave_out(grammar: Grammar, words: Sequence[str]) -> None:
    """Removes the choices that have one of the words in them. Raises RpcError (INVALID_ARGUMENT) if none is left.

    Tokens alone would not do it: where a grammar demands a word, its letters spell it.
    """
    if grammar.WhichOneof("form") != "choice" or not words:
        return
    bare = {word.strip() or word for word in words}
    phrases = [word for word in bare if not _WORD.fullmatch(word)]
    texts = grammar.choice.texts
    size = sum(map(len, texts))
    if len(phrases) * (size + _SEARCH_CHARS * len(texts)) > _MAX_SEARCHED:
        raise invalid(
            f"bad_words has {len(phrases)} texts to search for within {len(texts)} choices of {size} characters "
            f"together, which takes too long: their number, times the characters and {_SEARCH_CHARS} for each choice, "
            f"may be at most {_MAX_SEARCHED}; give fewer words or choices",
            "bad_words",
        )
    left = [
        text for text in texts if bare.isdisjoint(_WORD.findall(text)) and not any(phrase in text for phrase in phrases)
    ]
    if not left:
        raise invalid("bad_words leave no choice: each choice has one of them in it; leave out words", "bad_words")
    grammar.choice.texts[:] = left


def disable_whitespace(grammar: Grammar) -> None:
    """Applies the default to a grammar of JSON that does not name its whitespace."""
    if grammar.WhichOneof("form") == "json_schema" and not grammar.HasField("whitespace_pattern"):
        grammar.disable_any_whitespace = True
