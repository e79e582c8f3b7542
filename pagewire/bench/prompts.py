"""The prompts of a run: from a file, or random words of the right length in the server's own tokens."""

import json
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagewire.bench.config import BenchConfig
from pagewire.errors import StartupError

logger = logging.getLogger(__name__)

# Short words, nearly all of them one token with the blank before them in today's vocabularies.
_WORDS = (Path(__file__).parent / "words.txt").read_text().split()


def from_file(config: BenchConfig, count: int) -> list[str]:
    """`count` prompts in the file's order after --prompt-offset, from the start again if it is too short."""
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


async def random_words(config: BenchConfig, count: int, count_tokens: Callable[[str], Awaitable[int]]) -> list[str]:
    """Distinct prompts of about --input-len tokens. count_tokens asks the server; it is called twice."""
    draw = random.Random(config.seed)

    def prompt(num_words: int) -> str:
        return " ".join(draw.choices(_WORDS, k=num_words))

    # tokens = per_word * words + constant; the constant is the chat template's and the BOS token's.
    few, many = max(1, config.input_len // 2), config.input_len + 8
    tokens_few, tokens_many = await count_tokens(prompt(few)), await count_tokens(prompt(many))
    per_word = max((tokens_many - tokens_few) / (many - few), 0.1)
    constant = tokens_many - per_word * many
    num_words = max(1, round((config.input_len - constant) / per_word))
    return [prompt(num_words) for _ in range(count)]
