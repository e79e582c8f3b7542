"""The limits of rows and steps."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.errors import StartupError

STATE_TOKENS = 512
# Tokens. Larger steps are never recorded on a CPU, and each takes memory of its own size.
LARGE_STEP = 512


@dataclass(frozen=True)
class Limits:
    """The limits of rows and steps, in tokens and requests, all >= 1. Raises StartupError if no request fits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    state_tokens: int = STATE_TOKENS  # tokens per block of states; a multiple of block_size

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise StartupError(
                "a request could have one token in all, and no room to generate; raise --max-model-len or "
                "--num-gpu-blocks-override"
            )
