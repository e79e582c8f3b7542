"""The operator's defaults for the form of outputs: --structured-outputs-config."""

import re
from collections.abc import Sequence

from pagewire.services.tokenizer.errors import invalid
from pagewire.v1.common_pb2 import Grammar

_WORD = re.compile(r"\w+")
_MAX_COMPARED = 2**26  # characters that are searched for phrases, by their number


def leave_out(grammar: Grammar, words: Sequence[str]) -> None:
    """Removes the choices that have one of the words in them. Raises RpcError (INVALID_ARGUMENT) if none is left.

    Tokens alone would not do it: where a grammar demands a word, its letters spell it.
    """
    if grammar.WhichOneof("form") != "choice" or not words:
        return
    bare = {word.strip() or word for word in words}
    phrases = [word for word in bare if not _WORD.fullmatch(word)]
    texts = grammar.choice.texts
    if len(phrases) * (size := sum(map(len, texts))) > _MAX_COMPARED:
        raise invalid(
            f"bad_words has {len(phrases)} texts with more than letters, and choice has {size} characters, which are "
            f"too many to compare: their product may be at most {_MAX_COMPARED}; give fewer",
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
