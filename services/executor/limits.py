"""What rows and steps are bounded by."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.errors import StartupError


@dataclass(frozen=True)
class Limits:
    """What rows and steps are bounded by; tokens and requests, all >= 1. Raises StartupError if no request fits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise StartupError(
                "a request could have one token in all, its prompt's, and nothing to generate: raise --max-model-len "
                "or --num-gpu-blocks-override"
            )
