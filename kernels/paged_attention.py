"""paged_attention on CUDA: one kernel for prefill, decode and mixed batches.

A program computes BLOCK_M rows of one request and one KV head. Rows are (query token, head of the group) pairs, so the
heads that share a KV head read its keys once. The grid has an upper bound of programs (no length is read on the host):
programs find their request by binary search in query_start_loc; surplus ones return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def paged_attention_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM], strided
    kv_cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM] contiguous
    block_table_ptr,  # int32 [num_reqs, max_blocks]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    seq_lens_ptr,  # int32 [num_reqs]
    num_reqs,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    block_stride,
    value_stride,  # from the keys of a block to its values
    head_stride,  # from one KV head to the next inside a block
    table_stride,
    scale,
    sliding_window,
    soft_cap,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_Q: tl.constexpr,  # query tokens of a tile: BLOCK_M // GROUP
    BLOCK_N: tl.constexpr,  # keys per iteration
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Request b owns the tiles query_start_loc[b] // BLOCK_Q + b up to the same value of b + 1: enough for any length.
    low = 0
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    request = low
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_token = (tile - query_start // BLOCK_Q - request) * BLOCK_Q
    seq_len = tl.load(seq_lens_ptr + request)
    if (first_token >= query_len) | (seq_len <= 0):
        return

    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // GROUP
    in_rows = (rows < BLOCK_Q * GROUP) & (token < query_len)
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, DIMS)
    in_dims = dims < HEAD_DIM
    row_mask = in_rows[:, None] & in_dims[None, :]
    row_token = (query_start + token).to(tl.int64)
    query = tl.load(
        query_ptr + (row_token * query_token_stride + head * query_head_stride)[:, None] + dims[None, :],
        mask=row_mask,
        other=0.0,
    )
    position = seq_len - query_len + token  # of each row

    # Keys from the first that the tile's first token sees to the last that its last token sees.
    key_end = tl.minimum(seq_len, seq_len - query_len + first_token + BLOCK_Q)
    first_visible = 0
    if HAS_WINDOW:
        first_visible = tl.maximum(seq_len - query_len + first_token - sliding_window + 1, 0)

    maximum = tl.full([BLOCK_M], -1e30, dtype=tl.float32)  # finite: a row that sees no key yet yields no NaN
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, DIMS], dtype=tl.float32)
    table = block_table_ptr + tl.cast(request, tl.int64) * table_stride
    head_base = kv_cache_ptr + kv_head * head_stride
    for start in range(first_visible // BLOCK_N * BLOCK_N, key_end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        in_keys = (keys >= first_visible) & (keys < key_end)  # nothing else is read: it may hold anything
        block = tl.load(table + keys // BLOCK_SIZE, mask=in_keys, other=0).to(tl.int64)
        key_offset = block * block_stride + (keys % BLOCK_SIZE) * HEAD_DIM
        kv_mask = in_keys[:, None] & in_dims[None, :]
        pointers = head_base + key_offset[:, None] + dims[None, :]
        key = tl.load(pointers, mask=kv_mask, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)  # soft_cap * tanh(scores / soft_cap)
        visible = keys[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= keys[None, :] > position[:, None] - sliding_window
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        value = tl.load(pointers + value_stride, mask=kv_mask, other=0.0).to(query.dtype)
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(query.dtype), value, acc, input_precision="ieee")
        denominator = denominator * correction + tl.sum(weights, axis=1)
        maximum = new_maximum

    result = acc / denominator[:, None]
    out = out_ptr + (row_token * out_token_stride + head * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=row_mask)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """As `reference.paged_attention`. Each page of kv_cache is contiguous, as is the last dimension of query."""
    num_tokens, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, cache_head_dim = kv_cache.shape
    assert head_dim == cache_head_dim, "query and kv_cache differ in head_dim"
    assert num_heads % num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads"
    assert query.stride(2) == 1, "the last dimension of query must be contiguous"
    assert kv_cache.stride()[2:] == (block_size * head_dim, head_dim, 1), "pages must be contiguous"
    assert block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32, "tables must be int32"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_reqs = seq_lens.shape[0]
    if num_tokens == 0 or num_reqs == 0:
        return out
    group = num_heads // num_kv_heads
    block_m = tile_rows(group, max_query_len)
    block_q = block_m // group
    dims = max(16, triton.next_power_of_2(head_dim))  # tl.dot needs 16
    paged_attention_kernel[(num_tokens // block_q + num_reqs, num_kv_heads)](
        query,
        kv_cache,
        out,
        block_table,
        query_start_loc,
        seq_lens,
        num_reqs,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        block_table.stride(0),
        scale,
        sliding_window,
        soft_cap,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIMS=dims,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=32,
        HAS_WINDOW=sliding_window > 0,
        HAS_SOFT_CAP=soft_cap > 0,
        num_warps=tile_warps(block_m, dims),
        num_stages=2,
    )
    return out


def tile_rows(group: int, max_query_len: int) -> int:
    """Rows of a tile: the fewest that tl.dot takes for decode, more where queries are long enough to fill them."""
    rows = max(16, triton.next_power_of_2(group))
    while rows < 64 and rows < max_query_len * group:
        rows *= 2
    return rows


def tile_warps(rows: int, dims: int) -> int:
    """Warps per program: more where 4 could not hold the accumulator [rows, dims] in their registers."""
    return 8 if rows * dims > 64 * 128 else 4
