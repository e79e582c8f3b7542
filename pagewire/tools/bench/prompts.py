"""The prompts of a run: from a file, or random words with the right number of the server's tokens."""

import json
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagewire.errors import StartupError
from pagewire.tools.bench.config import BenchConfig

logger = logging.getLogger(__name__)

# Short words; in current vocabularies, nearly all are one token with the preceding blank.
_WORDS = (Path(__file__).parent / "words.txt").read_text().split()


def from_file(config: BenchConfig, count: int) -> list[str]:
    """Returns `count` prompts in the file's order after --prompt-offset, from the start again if the file is too
    short."""
    path = Path(config.prompts_file or "")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [row for row in rows if config.prompt_tokens in (None, row.get("tokens"))]
        prompts = [str(row["prompt"]) for row in rows]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StartupError(f'{path}: expected JSON lines {{"prompt": "...", "tokens": N}} ({error!r})') from error
    if not prompts:
        wanted = f" of {config.prompt_tokens} tokens" if config.prompt_tokens else ""
        raise StartupError(f"{path}: no prompts{wanted}")
    if config.prompt_offset + count > len(prompts):
        logger.warning("%s has only %d such prompts: some repeat, and may hit prefix caches", path, len(prompts))
    return [prompts[(config.prompt_offset + i) % len(prompts)] for i in range(count)]


class RandomWords:
    """Makes distinct prompts of approximately any length in tokens."""

    def __init__(self, draw: random.Random, per_word: float, constant: float) -> None:
        """tokens = per_word * words + constant; the constant is for the chat template and the BOS token."""
        self._draw = draw
        self._per_word = per_word
        self._constant = constant

    @classmethod
    async def measured(
        cls, seed: int | None, length: int, count_tokens: Callable[[str], Awaitable[int]]
    ) -> "RandomWords":
        """Returns random words, best for prompts of `length` tokens. count_tokens, which may ask a server, is called
        twice."""
        words = cls(random.Random(seed), per_word=1.0, constant=0.0)
        few = max(1, length // 2)
        many = max(few + 1, length)
        tokens_few, tokens_many = await count_tokens(words._prompt(few)), await count_tokens(words._prompt(many))
        words._per_word = max((tokens_many - tokens_few) / (many - few), 0.1)
        words._constant = tokens_many - words._per_word * many
        return words

    def prompts(self, length: int, count: int) -> list[str]:
        num_words = max(1, round((length - self._constant) / self._per_word))
        return [self._prompt(num_words) for _ in range(count)]

    def _prompt(self, num_words: int) -> str:
        # The first word is always the same: without a preceding blank, some words are two tokens.
        return " ".join([_WORDS[0], *self._draw.choices(_WORDS, k=num_words - 1)])
