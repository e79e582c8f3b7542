"""Gate and up projections in one product: which rows of the weight a tile has, and what becomes of its sums.

A tile of BLOCK_N rows has BLOCK_N / 2 gates and what they multiply, so that it can give silu(gate) * up itself, and
neither is written to memory. Eight gates alternate with eight ups: these are rows that the same threads have after a
product on tensor cores (row r and r + 8 of 16, in fragments of mma.m16n8 and of wgmma alike), so none are exchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(tile, num_outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Int32 [BLOCK_N]: rows of a weight [num_outputs, K], or with GATED [2 * num_outputs, K]. The last one repeats."""
    row = tl.arange(0, BLOCK_N)
    if GATED:
        output = tile * (BLOCK_N // 2) + row // 16 * 8 + row % 8
        return tl.minimum(output, num_outputs - 1) + row // 8 % 2 * num_outputs
    return tl.minimum(tile * BLOCK_N + row, num_outputs - 1)


@triton.jit
def tile_runs(tile, num_outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Computes `tile_rows`, for loads of whole runs. GATED: of 8 rows, the last of which may repeat, num_outputs a
    multiple of 8; else rows are neighbours, some beyond the last."""
    row = tl.arange(0, BLOCK_N)
    if GATED:
        run = tl.minimum(tile * (BLOCK_N // 2) + row // 16 * 8, num_outputs - 8)
        return run + row // 8 % 2 * num_outputs + row % 8
    return tile * BLOCK_N + row


@triton.jit
def of_rows(gates, ups, ROWS_LAST: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Returns for each row of a tile one of two numbers, side by side where ROWS_LAST. Which of them a register takes
    is known when compiling."""
    found = gates
    if GATED:
        is_gate = tl.arange(0, BLOCK_N) // 8 % 2 == 0
        found = tl.where(is_gate[None, :] if ROWS_LAST else is_gate[:, None], gates, ups)
    return found


@triton.jit
def silu_and_mul(sums):
    """Fp32 [BLOCK_N, BLOCK_M] of a tile -> silu(gate) * up [BLOCK_N / 2, BLOCK_M]."""
    BLOCK_N: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    pairs = tl.permute(tl.reshape(sums, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    return tl.reshape(gate * tl.sigmoid(gate) * up, (BLOCK_N // 2, BLOCK_M))
