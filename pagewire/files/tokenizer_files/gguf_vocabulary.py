"""The tokens and their types, for all tokenizers from GGUF files."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer


class TokenType(IntEnum):
    """The values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Spaces:
    """States whether an added token takes the spaces before and after it."""

    before: bool = False
    after: bool = False


class GgufTokenizerError(ValueError):
    """Raised if no tokenizer can be built from the file; the message names the key and the remedy."""


def unique(tokens: Iterable[str]) -> dict[str, int]:
    """Returns ids by token. A spelling that occurs twice keeps its first id; the copies get names that no text
    produces."""
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab[token if token not in vocab else f"{token}\x00{token_id}"] = token_id
    return vocab


def add_special_tokens(
    backend: Tokenizer,
    tokens: list[str],
    types: Sequence[int],
    spaces_of: Callable[[str], Spaces],
    *,
    is_normalized: bool,
) -> None:
    """Adds control tokens, which are matched whole in text and skipped in output, and user-defined ones, which are only
    matched.

    spaces_of: says which spaces a token takes. is_normalized: user-defined ones are spelled like normalized text.
    """

    def added(kind: TokenType, *, normalized: bool) -> list[AddedToken]:
        texts = [token for token, token_type in zip(tokens, types, strict=True) if token_type == kind]
        return [
            AddedToken(
                token,
                normalized=normalized,
                special=kind == TokenType.CONTROL,
                lstrip=spaces_of(token).before,
                rstrip=spaces_of(token).after,
            )
            for token in texts
        ]

    backend.add_special_tokens(added(TokenType.CONTROL, normalized=False))
    backend.add_tokens(added(TokenType.USER_DEFINED, normalized=is_normalized))
