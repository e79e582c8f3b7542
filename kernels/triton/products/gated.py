"""Gate and up projections in one product: which rows of the weight a tile has, and what becomes of its sums.

A tile of BLOCK_N rows has BLOCK_N / 2 gates and, behind them, what they multiply, so that it can give silu(gate) * up
itself, and neither is written to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(tile, num_outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Int32 [BLOCK_N]: rows of a weight [num_outputs, K], or with GATED [2 * num_outputs, K]. The last one repeats."""
    row = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        return tl.minimum(tile * HALF + row % HALF, num_outputs - 1) + row // HALF * num_outputs
    return tl.minimum(tile * BLOCK_N + row, num_outputs - 1)


@triton.jit
def silu_and_mul(sums):
    """Fp32 [BLOCK_N, BLOCK_M] of a tile -> silu(gate) * up [BLOCK_N / 2, BLOCK_M]."""
    HALF: tl.constexpr = sums.shape[0] // 2
    halves = tl.permute(tl.reshape(sums, (2, HALF, sums.shape[1])), (1, 2, 0))
    gate, up = tl.split(halves)
    return gate * tl.sigmoid(gate) * up
