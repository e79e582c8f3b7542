"""Split-KV: merges the partial results of the splits of a context, and counts the finished programs.

`split_plan` cuts contexts; `decode_attention` explains the purpose.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import NO_KEY, store_rows, token_and_head, with_sinks

# Columns that a row of a partial has behind its HEAD_DIM sums: maximum, denominator, and padding to 16 bytes.
STATISTICS = tl.constexpr(4)


@triton.jit
def merge(
    rows_ptr,  # [rows], those of the first partial
    split_stride,
    num_splits,
    in_rows,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    MERGED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes acc [rows, DIMS], acc_rest [rows, REST], maximum and denominator of all splits, from their partials."""
    ROWS: tl.constexpr = in_rows.shape[0]
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    acc_rest = tl.zeros([ROWS, max(1, REST)], tl.float32)
    maximum = tl.full([ROWS], NO_KEY, dtype=tl.float32)
    denominator = tl.zeros([ROWS], dtype=tl.float32)
    # The latency of loads is all that this loop costs. So MERGED splits are loaded together, and the next ones are on
    # their way, in shared memory.
    # What other multiprocessors stored is seen because the caller's atomic acquires, which empties the L1 cache; ".cg"
    # keeps out of it what is copied by 16 bytes.
    for first in tl.range(0, num_splits, MERGED, num_stages=STAGES):
        split = first + tl.arange(0, MERGED)
        mask = (split < num_splits)[:, None] & in_rows[None, :]
        pointers = rows_ptr[None, :] + split.to(tl.int64)[:, None] * split_stride
        maxima = tl.load(pointers + VALUE_DIM, mask=mask, other=NO_KEY, cache_modifier=".cg")
        denominators = tl.load(pointers + VALUE_DIM + 1, mask=mask, other=0.0, cache_modifier=".cg")
        parts = _load_parts(pointers, mask, 0, DIMS, VALUE_DIM)
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        old = tl.exp2(maximum - new_maximum)
        new = tl.exp2(maxima - new_maximum[None, :])
        acc = acc * old[:, None] + tl.sum(parts * new[:, :, None], axis=0)
        if REST > 0:
            parts = _load_parts(pointers, mask, DIMS, REST, VALUE_DIM)
            acc_rest = acc_rest * old[:, None] + tl.sum(parts * new[:, :, None], axis=0)
        denominator = denominator * old + tl.sum(denominators * new, axis=0)
        maximum = new_maximum
    return acc, acc_rest, maximum, denominator


@triton.jit
def _load_parts(pointers, mask, FIRST: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr):
    """fp32 [splits, rows, SIZE]"""
    dims = FIRST + tl.arange(0, SIZE)
    tile_mask = mask[:, :, None] & (dims < VALUE_DIM)[None, None, :]
    return tl.load(pointers[:, :, None] + dims[None, None, :], mask=tile_mask, other=0.0, cache_modifier=".cg")


@triton.jit
def finish_rows(
    first_row, num_tokens, kv_head, num_kv_heads, partials, split_stride, num_splits, out_tile, value_scale, sinks_ptr,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr,
    MERGED_ROWS: tl.constexpr, MERGED: tl.constexpr, MERGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Merges all splits of some rows of a tile, and writes the rows' output."""
    rows = first_row + tl.arange(0, MERGED_ROWS)
    token, head = token_and_head(rows, GROUP, BLOCK_Q)
    in_rows = (rows < BLOCK_Q * GROUP) & (token < num_tokens)
    pointers = partials + rows * (VALUE_DIM + STATISTICS)
    acc, acc_rest, maximum, denominator = merge(
        pointers, split_stride, num_splits, in_rows, VALUE_DIM, DIMS, REST, MERGED, MERGE_STAGES
    )
    denominator = with_sinks(denominator, maximum, sinks_ptr, kv_head * GROUP + head, in_rows)
    result = value_scale / denominator
    out_rows = out_tile + token * (num_kv_heads * GROUP * VALUE_DIM) + head * VALUE_DIM
    store_rows(out_rows, in_rows, acc * result[:, None], 0, DIMS, VALUE_DIM)
    if REST > 0:
        store_rows(out_rows, in_rows, acc_rest * result[:, None], DIMS, REST, VALUE_DIM)
