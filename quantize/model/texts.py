"""Text to calibrate on and to measure perplexity on, as sequences of tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer

logger = logging.getLogger(__name__)

_BUNDLED = Path(__file__).with_name("evaluation.txt")  # the first chapter of Alice in Wonderland (1865)
_HELD_OUT = 10  # the held-out share of the calibration text is 1 / this


def read_documents(path: Path) -> list[str]:
    """Reads documents: a text file is one; in a .jsonl file, each line has one as "text". Raises StartupError."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if path.suffix != ".jsonl":
        return [content]
    documents = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise StartupError(f'{path}, line {number}: expected {{"text": "..."}} ({error!r})') from error
        if not isinstance(document, str):
            raise StartupError(f'{path}, line {number}: "text" is not a string')
        documents.append(document)
    return documents


def encode(tokenizer: LoadedTokenizer, documents: Sequence[str], separator: int | None) -> list[int]:
    """Returns the tokens of all documents in order, with the separator's token between them."""
    tokens: list[int] = []
    for document in documents:
        if tokens and separator is not None:
            tokens.append(separator)
        tokens += tokenizer.encode(document, add_special_tokens=False)
    return tokens


def held_out(tokens: list[int]) -> tuple[list[int], list[int]]:
    """Returns the text without its end, and its end."""
    cut = len(tokens) - len(tokens) // _HELD_OUT
    return tokens[:cut], tokens[cut:]


def bundled_documents() -> list[str]:
    return read_documents(_BUNDLED)


def sequences(tokens: Sequence[int], count: int, length: int, what: str) -> Tensor:
    """Returns int64 [at most count, length], spread evenly over the text. Raises StartupError if there is none.

    what: names the text in messages.
    """
    available = len(tokens) // length
    if not available:
        raise StartupError(
            f"{what} has {len(tokens)} tokens, a sequence takes {length}: give more text, or lower --calibration-length"
        )
    if available < count:
        logger.info("%s has tokens for %d of the %d requested sequences", what, available, count)
    picks = [index * available // min(count, available) for index in range(min(count, available))]
    return torch.tensor(tokens[: available * length]).view(available, length)[picks]
