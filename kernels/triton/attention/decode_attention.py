"""Paged attention of short queries (up to SHORT_QUERY tokens): decode and speculative verification.

Each program does one item of the plan (`split_plan`) for one KV head: one query tile against one split of a context.
It loads its item by four parallel loads, before the query and the block ids.

A request with one split writes its output. Otherwise each program writes its partial result (not normalised) to
`partials` and counts itself; the last one to arrive merges them, in the order of the splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import (
    NO_KEY,
    argument_types,
    attend,
    head_parts,
    in_order,
    load_query,
    repeated,
    store_rows,
    token_and_head,
    with_sinks,
    zero_parts,
)
from pagewire.kernels.triton.attention.pages import load_blocks, load_whole_tile_blocks, prefetch_split
from pagewire.kernels.triton.attention.split_cut import cut_for, query_tile
from pagewire.kernels.triton.attention.split_kv import STATISTICS, finish_rows
from pagewire.kernels.triton.attention.split_plan import plan_for
from pagewire.kernels.triton.attention.work_item import WORDS, load_item
from pagewire.kernels.triton.common import fp8
from pagewire.kernels.triton.common.arrivals import arrival_counters, arrives_last
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization

# Tiles of keys of a split that a program prefetches before it waits, if the split has no more.
PREFETCHED = tl.constexpr(4)
# fp32 numbers of partials that a thread holds while it merges.
_MERGED_SUMS = 32
_MOST_MERGE_STAGES = 6


@triton.jit
def decode_attention_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM], heads contiguous
    kv_cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], blocks contiguous; fp8 as uint8
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM] contiguous
    block_table_ptr,  # int32 [num_reqs, max_blocks]
    plan_ptr,  # int32 [items, WORDS], of `work_item`
    kv_scales_ptr,  # fp32 [2, num_kv_heads] of fp8, bf16 [num_blocks, 2, num_kv_heads, BLOCK_SIZE] of int8, or None
    sinks_ptr,  # fp32 [num_heads], or None
    partials_ptr,  # fp32 [items, num_kv_heads, BLOCK_Q * GROUP, HEAD_DIM + STATISTICS]
    arrived_ptr,  # int32 [items, num_kv_heads]: at a tile's first item, how many of its splits are done; in the end 0
    query_token_stride,  # bytes
    block_stride,  # bytes
    scale,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile, of which BLOCK_Q * GROUP are used
    BLOCK_Q: tl.constexpr,  # query tokens of a tile
    BLOCK_N: tl.constexpr,  # keys of a tile
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    LATENT_DIM: tl.constexpr,  # 0: keys and values are apart
    WHOLE_TILES: tl.constexpr,  # the block table is as `load_whole_tile_blocks` wants it
    MERGED_ROWS: tl.constexpr,  # rows that are merged together, and splits
    MERGED: tl.constexpr,
    MERGE_STAGES: tl.constexpr,  # as many splits are on their way, but for one time
):
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    VALUE_DIM: tl.constexpr = LATENT_DIM if LATENT_DIM > 0 else HEAD_DIM
    VALUE_REST: tl.constexpr = 0 if LATENT_DIM > 0 else REST
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    # Where a program reads is settled before the step's first layer, and found out while the kernel before this ends.
    item = load_item(plan_ptr + tl.program_id(0) * WORDS)
    entry, first_token, start, masked, end, first_position, partial, split, num_splits, num_tokens, num_tiles = item
    head_offset = 0 if LATENT_DIM > 0 else kv_head * (BLOCK_SIZE * HEAD_DIM)
    value_offset = num_kv_heads * (BLOCK_SIZE * HEAD_DIM)
    bound = (end - 1).to(tl.uint32) // BLOCK_N * BLOCK_N if WHOLE_TILES else end
    blocks = _load_blocks(block_table_ptr, entry, start, bound, BLOCK_SIZE, BLOCK_N, WHOLE_TILES)
    prefetch_split(
        kv_cache_ptr, head_offset, value_offset, block_table_ptr + entry, start, masked, block_stride, BLOCK_SIZE,
        HEAD_DIM, BLOCK_N, LATENT_DIM, PREFETCHED,
    )  # fmt: skip
    wait_for_inputs()
    launch_dependents()
    if num_tokens == 0:
        return

    rows = tl.arange(0, BLOCK_M)
    token, head = token_and_head(rows, GROUP, BLOCK_Q)
    in_rows = (rows < ROWS) & (token < num_tokens)
    # As bytes: address and stride of a token are then one multiply-add.
    query_bytes = query_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    query_bytes += first_token.to(tl.int64) * query_token_stride
    query_tile = query_bytes.to(query_ptr.dtype, bitcast=True)
    # Rows that are not used repeat others, so that loads need no mask: what becomes of them is not stored.
    near_token, near_head = token_and_head(repeated(rows, ROWS), GROUP, BLOCK_Q)
    query_rows = (kv_head * GROUP + near_head) * HEAD_DIM
    if BLOCK_Q > 1:
        QUERY_BYTES: tl.constexpr = query_ptr.dtype.element_ty.primitive_bitwidth // 8
        query_rows += tl.minimum(near_token, num_tokens - 1) * (query_token_stride // QUERY_BYTES)
    query_rows = tl.multiple_of(query_rows, 8)
    FP8_CACHE: tl.constexpr = kv_cache_ptr.dtype.element_ty == tl.uint8
    query = load_query(query_tile, query_rows, in_rows, 0, DIMS, HEAD_DIM, False, FP8_CACHE)
    query_rest = query
    if REST > 0:
        query_rest = load_query(query_tile, query_rows, in_rows, DIMS, REST, HEAD_DIM, False, FP8_CACHE)
    acc, acc_rest = zero_parts(BLOCK_M, DIMS, VALUE_REST, FP8_CACHE)
    maximum = tl.full([BLOCK_M], NO_KEY, dtype=tl.float32)
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    position = first_position + token
    value_scale = 1.0
    if FP8_CACHE:
        scale *= tl.load(kv_scales_ptr + kv_head)
        value_scale = tl.load(kv_scales_ptr + num_kv_heads + kv_head)

    # A window masks every tile: reading is what costs here. "evict_first" holds where loads are not pipelined: Triton
    # (3.6, 3.7) drops it from those that it makes asynchronous.
    for tile_start in tl.range(start, masked, BLOCK_N):
        following = _load_blocks(
            block_table_ptr, entry, tile_start + BLOCK_N, bound, BLOCK_SIZE, BLOCK_N, WHOLE_TILES
        )  # fmt: skip
        acc, acc_rest, maximum, denominator = attend(
            query, query_rest, acc, acc_rest, maximum, denominator, kv_cache_ptr, kv_scales_ptr, kv_head, num_kv_heads,
            head_offset, blocks, tile_start, end, position, scale, block_stride, value_offset, BLOCK_SIZE, HEAD_DIM,
            DIMS, REST, BLOCK_N, WINDOW, SOFT_CAP, "evict_first", NATIVE_FP8, LATENT_DIM, WINDOW > 0,
        )  # fmt: skip
        blocks = following
    for tile_start in tl.range(masked, end, BLOCK_N, num_stages=1):
        following = _load_blocks(
            block_table_ptr, entry, tile_start + BLOCK_N, bound, BLOCK_SIZE, BLOCK_N, WHOLE_TILES
        )  # fmt: skip
        acc, acc_rest, maximum, denominator = attend(
            query, query_rest, acc, acc_rest, maximum, denominator, kv_cache_ptr, kv_scales_ptr, kv_head, num_kv_heads,
            head_offset, blocks, tile_start, end, position, scale, block_stride, value_offset, BLOCK_SIZE, HEAD_DIM,
            DIMS, REST, BLOCK_N, WINDOW, SOFT_CAP, "evict_first", NATIVE_FP8, LATENT_DIM, True,
        )  # fmt: skip
        blocks = following
    acc, acc_rest = in_order(acc, acc_rest, FP8_CACHE)

    out_tile = out_ptr + (first_token.to(tl.int64) * num_kv_heads + kv_head) * (GROUP * VALUE_DIM)
    if num_splits == 1:
        denominator = with_sinks(denominator, maximum, sinks_ptr, kv_head * GROUP + head, in_rows)
        result = value_scale / denominator
        out_rows = out_tile + token * (num_kv_heads * GROUP * VALUE_DIM) + head * VALUE_DIM
        store_rows(out_rows, in_rows, acc * result[:, None], 0, DIMS, VALUE_DIM)
        if VALUE_REST > 0:
            store_rows(out_rows, in_rows, acc_rest * result[:, None], DIMS, VALUE_REST, VALUE_DIM)
        return

    WIDTH: tl.constexpr = VALUE_DIM + STATISTICS
    # Of the first split, and of this one.
    partials = partials_ptr + (partial.to(tl.int64) * num_kv_heads + kv_head) * (ROWS * WIDTH)
    split_stride = num_tiles * num_kv_heads * (ROWS * WIDTH)
    mine = partials + split.to(tl.int64) * split_stride + rows * WIDTH
    store_rows(mine, in_rows, acc, 0, DIMS, VALUE_DIM)
    if VALUE_REST > 0:
        store_rows(mine, in_rows, acc_rest, DIMS, VALUE_REST, VALUE_DIM)
    tl.store(mine + VALUE_DIM, maximum, mask=in_rows)
    tl.store(mine + VALUE_DIM + 1, denominator, mask=in_rows)
    if not arrives_last(arrived_ptr + partial * num_kv_heads + kv_head, num_splits):
        return

    # Of the tile no more rows than are used, some at a time, and more splits instead.
    for first_row in range(0, ROWS, MERGED_ROWS):
        finish_rows(
            first_row, num_tokens, kv_head, num_kv_heads, partials, split_stride, num_splits, out_tile, value_scale,
            sinks_ptr, GROUP, BLOCK_Q, VALUE_DIM, DIMS, VALUE_REST, MERGED_ROWS, MERGED, MERGE_STAGES,
        )  # fmt: skip


@triton.jit
def _load_blocks(
    block_table_ptr, entry, start, bound, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE_TILES: tl.constexpr
):  # fmt: skip
    """Returns the block ids of the tile at `start`. bound: the request's last tile, with the ids that tiles behind it
    get; or, without WHOLE_TILES, the end of its keys."""
    if WHOLE_TILES:
        start = tl.minimum(tl.cast(start, tl.uint32), bound)
        return load_whole_tile_blocks(block_table_ptr, entry, start, BLOCK_SIZE, BLOCK_N)
    return load_blocks(block_table_ptr + entry, start, bound, BLOCK_SIZE, BLOCK_N)


@cache
def _constants(
    head_dim: int, group: int, block_size: int, block_m: int, block_q: int, block_n: int, num_warps: int,
    num_stages: int, window: int, soft_cap: float, kv_bytes: int, fp8_cache: bool, native_fp8: bool, latent_dim: int,
    whole_tiles: bool,
) -> dict[str, Any]:  # fmt: skip
    """What the kernel is compiled for."""
    dims, rest = head_parts(head_dim, fp8_cache, latent_dim)
    sums = _MERGED_SUMS * 32 * num_warps // dims
    rows = min(triton.next_power_of_2(block_q * group), sums)
    merged = min(16, sums // rows)
    # Partials on their way take the shared memory that the loops before need no more, but a little of it anyway; of 16
    # at a time, which registers hold, none are.
    keys_and_values = (num_stages - 1) * block_n * head_dim * kv_bytes * (1 if latent_dim else 2)
    tile = merged * rows * dims
    least = 1 if merged >= 8 else 4 if tile <= 2048 else 3 if tile <= 4096 else 2
    stages = max(least, min(1 + keys_and_values // (4 * tile), _MOST_MERGE_STAGES if merged < 16 else 1))
    return {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIMS": dims,
        "REST": rest,
        "BLOCK_M": block_m,
        "BLOCK_Q": block_q,
        "BLOCK_N": block_n,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "NATIVE_FP8": native_fp8,
        "LATENT_DIM": latent_dim,
        "WHOLE_TILES": whole_tiles,
        "MERGED_ROWS": rows,
        "MERGED": merged,
        "MERGE_STAGES": stages,
    }


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    split_size: int,
    config: Mapping[str, int],
    latent_dim: int = 0,
    plan: Tensor | None = None,
) -> None:
    """The requests of up to SHORT_QUERY query tokens, to their places in out; arguments as `paged_attention` has them.

    config: block_n (keys of a tile; in 16 bits 32 or more, for with 16 keys every warp would compute all of it on the
    tensor cores), num_warps, num_stages, programs_per_sm (that the GPU holds at once), min_split (tokens of a split,
    at least).
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    made = cut_for(query, kv_cache, block_table, max_query_len, split_size, config)
    if plan is None:
        plan = plan_for(
            query, kv_cache, block_table, query_start_loc, seq_lens, max_query_len, sliding_window, split_size, config
        )
    assert plan.shape == (made.num_items, WORDS.value), "the plan is of another batch or another kind of attention"
    constants = _constants(
        head_dim, num_heads // num_kv_heads, block_size, made.block_m, made.block_q, config["block_n"],
        config["num_warps"], config["num_stages"], sliding_window, soft_cap, kv_cache.element_size(),
        kv_cache.dtype == torch.uint8, fp8.has_native_decode(query.device), latent_dim,
        _has_whole_tiles(block_table, block_size, config["block_n"], sliding_window),
    )  # fmt: skip
    rows = made.block_q * constants["GROUP"]
    partials = torch.empty(
        made.num_items * num_kv_heads * rows * (out.shape[2] + STATISTICS.value),
        dtype=torch.float32,
        device=query.device,
    )
    decode_attention_kernel[(made.num_items, num_kv_heads)](
        query,
        kv_cache,
        out,
        block_table,
        plan,
        kv_scales,
        sinks,
        partials,
        arrival_counters(query.device, made.num_items * num_kv_heads),
        query.stride(0) * query.element_size(),
        kv_cache.stride(0) * kv_cache.element_size(),
        scale,
        **constants,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **dependent_launch(query.device),
    )


def _has_whole_tiles(block_table: Tensor, block_size: int, block_n: int, sliding_window: int) -> bool:
    """Whether the ids of a tile's pages may be loaded together. The executor's tables are so; a window begins with any
    page."""
    pages = max(1, block_n // block_size)
    aligned = block_table.stride(0) % pages == 0 and block_table.data_ptr() % 16 == 0
    return aligned and sliding_window == 0


_TYPES = {
    "query_ptr": "",
    "kv_cache_ptr": "",
    "out_ptr": "",
    "block_table_ptr": "*i32",
    "plan_ptr": "*i32",
    "kv_scales_ptr": "",
    "sinks_ptr": "*fp32",
    "partials_ptr": "*fp32",
    "arrived_ptr": "*i32",
    "query_token_stride": "i32",
    "block_stride": "i32",
    "scale": "fp32",
}


def specialization(
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    config: Mapping[str, int],
    *,
    capability: int,
    query_len: int = 1,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    latent_dim: int = 0,
) -> Specialization:
    """Returns what `decode_attention` compiles for such a model and batch on a GPU of `capability` (90 for 9.0)."""
    fp8_cache = kv_dtype == torch.float8_e4m3fn
    types, absent = argument_types(_TYPES, dtype, kv_dtype, sinks)
    constants = _constants(
        head_dim, group, block_size, *query_tile(head_dim, group, query_len), config["block_n"], config["num_warps"],
        config["num_stages"], sliding_window, soft_cap, kv_dtype.itemsize, fp8_cache, capability >= 89, latent_dim,
        sliding_window == 0,
    )  # fmt: skip
    return Specialization(decode_attention_kernel, types, constants | absent, config["num_warps"], config["num_stages"])
