"""Latent attention's Triton kernels against the reference, in Triton's interpreter. Run by test_values.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from pagewire.kernels import reference
from pagewire.kernels.triton.common import arrivals
from pagewire.kernels.triton.latent import latent_attention
from pagewire.kernels.triton.latent import rotary_store_latent as latent
from tests.kernels.batches import make_latent_batch, make_latents
from tests.kernels.triton.interpreted import run_cases

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}


def attention(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int = 6,
    latent_dim: int = 32,
    rotary_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    split_size: int = 0,
    block_size: int = 16,
) -> None:
    batch = make_latent_batch(
        [*query_lens], [*context_lens], num_heads, latent_dim, rotary_dim, dtype=dtype, block_size=block_size
    )
    actual = latent_attention.latent_attention(*batch.args(split_size))
    expected = reference.latent_attention(*batch.exact().args())
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)
    for buffers in arrivals._counters.values():
        assert not any(buffer.any() for buffer in buffers), "arrival counters are not back at zero"


def storing(
    num_heads: int, latent_dim: int, rotary_dim: int, interleaved: bool = True, dtype: torch.dtype = torch.float16
) -> None:
    latents = make_latents(dtype, 7, num_heads, latent_dim, rotary_dim, interleaved=interleaved)
    expected = latents.copy()
    latent.rotary_store_latent(*latents.args())
    reference.rotary_store_latent(*expected.args())
    for name in ("query", "kv_cache"):
        torch.testing.assert_close(getattr(latents, name), getattr(expected, name), atol=2e-3, rtol=2e-3)


CASES: dict[str, Callable[[], None]] = {
    "decode": partial(attention, [1, 1, 1], [0, 15, 70]),
    "DeepSeek's sizes": partial(attention, [1, 17], [40, 30], 16, 512, 64, torch.float16),
    "mixed, groups of heads": partial(attention, [1, 18, 3, 1], [70, 20, 33, 0], 24),
    "sizes that are no powers of two": partial(attention, [1, 20], [40, 30], 3, 40, 24),
    "all in one part": partial(attention, [1, 20], [40, 30], 3, 40, 8),
    "fixed split": partial(attention, [1, 2, 16], [300, 65, 130], split_size=32),
    "many splits": partial(attention, [1], [2500], 2),
    "pages of 64": partial(attention, [1, 30], [100, 90], block_size=64),
    "storing": partial(storing, 3, 32, 16),
    "storing, many heads, halves": partial(storing, 40, 24, 48, False, torch.float32),
    "storing DeepSeek's": partial(storing, 16, 512, 64),
}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, {}))
