"""Split-KV: the cutting of contexts into splits of equal length on the device, and the merging of their results.

`pagewire.kernels.triton.attention.decode_attention` says what for.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import NO_KEY, SHORT_QUERY

# Columns that a row of a partial has behind its HEAD_DIM sums: maximum, denominator, and padding to 16 bytes.
STATISTICS = tl.constexpr(4)


@triton.jit
def count_items(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, target_items, min_split,
    BLOCK_Q: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, REQS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The length of a split in tokens, and [REQS] the end of each request's items in the list of all.

    There are no more than target_items + (query tiles of all requests) items.
    """
    request = tl.arange(0, REQS)
    in_batch = request < num_reqs
    seq_len = tl.load(seq_lens_ptr + request, mask=in_batch, other=0)
    query_start = tl.load(query_start_loc_ptr + request, mask=in_batch, other=0)
    query_len = tl.load(query_start_loc_ptr + request + 1, mask=in_batch, other=0) - query_start
    tiles = tl.where((seq_len > 0) & (query_len <= SHORT_QUERY), tl.cdiv(query_len, BLOCK_Q), 0)
    context = seq_len - first_key(seq_len, query_len, PAGE_TOKENS, WINDOW)
    work = tl.sum(tiles.to(tl.int64) * context)
    split = tl.maximum(min_split, tl.cdiv(work, target_items).to(tl.int32))
    split = tl.cdiv(split, BLOCK_N) * BLOCK_N
    return split, tl.cumsum(tiles * tl.cdiv(context, split))


@triton.jit
def first_key(seq_len, query_len, PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Where a request's context begins for us: with the page of the first key that its first query token sees."""
    if WINDOW == 0:
        return seq_len * 0
    return tl.maximum(seq_len - query_len - WINDOW + 1, 0) // PAGE_TOKENS * PAGE_TOKENS


@triton.jit
def merge(
    rows_ptr,  # [BLOCK_M], the rows of the first partial
    split_stride,
    num_splits,
    in_rows,
    acc,
    acc_rest,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
):
    """acc, acc_rest, maximum and denominator of all splits, from their partials. The given acc only tell the shapes."""
    acc = tl.zeros_like(acc)
    acc_rest = tl.zeros_like(acc_rest)
    maximum = tl.full(in_rows.shape, NO_KEY, dtype=tl.float32)
    denominator = tl.zeros(in_rows.shape, dtype=tl.float32)
    dims = tl.arange(0, DIMS)
    # Pipelined, because the latency of a load is all that this loop costs; large tiles less deeply, for the sake of
    # shared memory (16 KiB a stage from 4096 elements on). What other multiprocessors stored is seen because the
    # caller's atomic acquires, which empties the L1 cache; ".cg" keeps out of it what is copied by 16 bytes.
    TILE: tl.constexpr = in_rows.shape[0] * DIMS
    STAGES: tl.constexpr = 4 if TILE <= 2048 else (3 if TILE <= 4096 else 2)
    for split in tl.range(0, num_splits, num_stages=STAGES):
        pointers = rows_ptr + split * split_stride
        mask = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(pointers[:, None] + dims[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        part_maximum = tl.load(pointers + HEAD_DIM, mask=in_rows, other=NO_KEY, cache_modifier=".cg")
        part_denominator = tl.load(pointers + HEAD_DIM + 1, mask=in_rows, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, part_maximum)
        old = tl.exp2(maximum - new_maximum)
        new = tl.exp2(part_maximum - new_maximum)
        acc = acc * old[:, None] + part * new[:, None]
        if REST > 0:
            rest = DIMS + tl.arange(0, REST)
            mask = in_rows[:, None] & (rest < HEAD_DIM)[None, :]
            part = tl.load(pointers[:, None] + rest[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            acc_rest = acc_rest * old[:, None] + part * new[:, None]
        denominator = denominator * old + part_denominator * new
        maximum = new_maximum
    return acc, acc_rest, maximum, denominator


# device -> zeros. Counters return to zero by the end of every launch, so one buffer serves all launches of a stream,
# and no launch has to clear any. All launches are on one stream. A buffer that was outgrown is kept: captured graphs
# have its address. Capture cannot grow it: the new buffer would be in the graphs' memory pool, which is reused.
_counters: dict[torch.device, list[Tensor]] = {}


def arrival_counters(device: torch.device, size: int) -> Tensor:
    """int32 zeros, at least `size` of them."""
    buffers = _counters.setdefault(device, [])
    if not buffers or buffers[-1].numel() < size:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a split attention or product has more parts than any before: run this batch size once before "
                "capturing it in a CUDA graph"
            )
        buffers.append(torch.zeros(max(1 << 16, triton.next_power_of_2(size)), dtype=torch.int32, device=device))
    return buffers[-1]
