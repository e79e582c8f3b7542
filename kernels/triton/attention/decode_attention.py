"""Paged attention of short queries (up to SHORT_QUERY tokens): decode and speculative verification.

Decode is the reading of the KV cache, so all of the GPU must read at once, whatever the batch: contexts are cut into
splits. A work item is one (request, split, query tile); a program does one item for one KV head. How long a split is,
and so how many items there are, is decided on the device: every program loads all lengths as one vector and computes
the same table of items from them. Nothing is read back, the grid is fixed, and one captured graph suits every step.

Example, split 512, queries of one token:

    seq_lens      = [700, 0, 1200]
    items         = [2, 0, 3]         per request
    ends          = [2, 2, 5]         their cumulative sum
    item 3        -> request 2 (two ends are <= 3), of its items the one of index 3 - 2 = 1: tokens 512 .. 1024

A request with one split writes its output. Otherwise each program writes what it has (not normalised) to `partials`
and counts itself; the last one to arrive merges them, in the order of the splits whoever comes last.
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
    SHORT_QUERY,
    Specialization,
    argument_types,
    attend,
    head_parts,
    in_order,
    load_blocks,
    load_query,
    requests_padded,
    store_rows,
    with_sinks,
    zero_parts,
)
from pagewire.kernels.triton.attention.split_kv import STATISTICS, arrival_counters, count_items, first_key, merge
from pagewire.kernels.triton.products import fp8

# The target of the fixed mode: no batch is so large that it, and not `min_split`, decides the length of a split.
_UNLIMITED = 2**31 - 1


@triton.jit(do_not_specialize=["num_reqs", "table_stride", "target_items", "min_split"])
def decode_attention_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM], heads contiguous
    kv_cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], blocks contiguous; fp8 as uint8
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM] contiguous
    block_table_ptr,  # int32 [num_reqs, max_blocks]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    seq_lens_ptr,  # int32 [num_reqs]
    kv_scales_ptr,  # fp32 [2, num_kv_heads], or None
    sinks_ptr,  # fp32 [num_heads], or None
    partials_ptr,  # fp32 [items, num_kv_heads, BLOCK_Q * GROUP, HEAD_DIM + STATISTICS]
    arrived_ptr,  # int32 [items, num_kv_heads]: at a tile's first item, how many of its splits are done; in the end 0
    num_reqs,
    query_token_stride,
    block_stride,
    table_stride,
    scale,
    target_items,
    min_split,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile, of which BLOCK_Q * GROUP are used
    BLOCK_Q: tl.constexpr,  # query tokens of a tile
    BLOCK_N: tl.constexpr,  # keys of a tile
    REQS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    LATENT_DIM: tl.constexpr,  # 0: keys and values are apart
):
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    PAGE_TOKENS: tl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    VALUE_DIM: tl.constexpr = LATENT_DIM if LATENT_DIM > 0 else HEAD_DIM
    VALUE_REST: tl.constexpr = 0 if LATENT_DIM > 0 else REST
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    split_size, ends = count_items(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, target_items, min_split,
        BLOCK_Q, PAGE_TOKENS, BLOCK_N, REQS, WINDOW,
    )  # fmt: skip
    item = tl.program_id(0)
    if item >= tl.max(ends):
        return
    request = tl.sum((ends <= item).to(tl.int32))
    first_item = tl.max(tl.where(ends <= item, ends, 0))

    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    context_start = first_key(seq_len, query_len, PAGE_TOKENS, WINDOW)
    num_splits = tl.cdiv(seq_len - context_start, split_size)
    # Query tiles of one split are neighbours: what the first reads from memory the others find in the L2 cache.
    num_tiles = tl.cdiv(query_len, BLOCK_Q)
    tile = (item - first_item) % num_tiles
    split = (item - first_item) // num_tiles
    first_token = tile * BLOCK_Q

    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // GROUP
    in_rows = (rows < ROWS) & (token < query_len)
    head = kv_head * GROUP + rows % GROUP
    row_token = (query_start + token).to(tl.int64)
    query_rows = query_ptr + tl.multiple_of(row_token * query_token_stride + head * HEAD_DIM, 8)
    FP8_CACHE: tl.constexpr = kv_scales_ptr is not None
    query = load_query(query_rows, in_rows, 0, DIMS, HEAD_DIM, FP8_CACHE)
    query_rest = query
    if REST > 0:
        query_rest = load_query(query_rows, in_rows, DIMS, REST, HEAD_DIM, FP8_CACHE)
    acc, acc_rest = zero_parts(BLOCK_M, DIMS, VALUE_REST, FP8_CACHE)
    maximum = tl.full([BLOCK_M], NO_KEY, dtype=tl.float32)
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    position = seq_len - query_len + token
    value_scale = 1.0
    if FP8_CACHE:
        scale *= tl.load(kv_scales_ptr + kv_head)
        value_scale = tl.load(kv_scales_ptr + num_kv_heads + kv_head)

    # Keys start .. end; those before `masked` are seen by every row, unless a window ends before them.
    start = context_start + split * split_size
    end = tl.minimum(start + split_size, tl.minimum(seq_len, seq_len - query_len + first_token + BLOCK_Q))
    seen = tl.minimum(end, seq_len - query_len + first_token + 1)
    masked = start + tl.maximum(seen - start, 0) // BLOCK_N * BLOCK_N
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    keys_ptr = kv_cache_ptr
    if LATENT_DIM == 0:
        keys_ptr += kv_head * (BLOCK_SIZE * HEAD_DIM)
    value_offset = num_kv_heads * (BLOCK_SIZE * HEAD_DIM)
    blocks = load_blocks(table_ptr, start, end, BLOCK_SIZE, BLOCK_N)
    masked_blocks = load_blocks(table_ptr, masked, end, BLOCK_SIZE, BLOCK_N)
    # A window masks every tile: reading is what costs here.
    for tile_start in tl.range(start, masked, BLOCK_N):
        following = load_blocks(table_ptr, tile_start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        acc, acc_rest, maximum, denominator = attend(
            query, query_rest, acc, acc_rest, maximum, denominator, keys_ptr, blocks, tile_start, end, position,
            scale, block_stride, value_offset, BLOCK_SIZE, HEAD_DIM, DIMS, REST, BLOCK_N, WINDOW, SOFT_CAP,
            "evict_first", NATIVE_FP8, LATENT_DIM, WINDOW > 0,
        )  # fmt: skip
        blocks = following
    blocks = masked_blocks
    for tile_start in tl.range(masked, end, BLOCK_N, num_stages=1):
        following = load_blocks(table_ptr, tile_start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        acc, acc_rest, maximum, denominator = attend(
            query, query_rest, acc, acc_rest, maximum, denominator, keys_ptr, blocks, tile_start, end, position,
            scale, block_stride, value_offset, BLOCK_SIZE, HEAD_DIM, DIMS, REST, BLOCK_N, WINDOW, SOFT_CAP,
            "evict_first", NATIVE_FP8, LATENT_DIM, True,
        )  # fmt: skip
        blocks = following
    acc, acc_rest = in_order(acc, acc_rest, FP8_CACHE)

    if num_splits > 1:
        WIDTH: tl.constexpr = VALUE_DIM + STATISTICS
        # The tile's partial of split s is that of item first_item + s * num_tiles + tile.
        tile_item = (first_item + tile).to(tl.int64)
        tile_rows = partials_ptr + (tile_item * num_kv_heads + kv_head) * (ROWS * WIDTH) + rows * WIDTH
        split_stride = num_tiles.to(tl.int64) * num_kv_heads * (ROWS * WIDTH)
        mine = tile_rows + split * split_stride
        store_rows(mine, in_rows, acc, 0, DIMS, VALUE_DIM)
        if VALUE_REST > 0:
            store_rows(mine, in_rows, acc_rest, DIMS, VALUE_REST, VALUE_DIM)
        tl.store(mine + VALUE_DIM, maximum, mask=in_rows)
        tl.store(mine + VALUE_DIM + 1, denominator, mask=in_rows)
        tl.debug_barrier()  # all threads have stored before one of them counts the program
        arrived = arrived_ptr + tile_item * num_kv_heads + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") < num_splits - 1:
            return
        tl.store(arrived, 0)  # for the next launch: all of the tile's programs have counted
        acc, acc_rest, maximum, denominator = merge(
            tile_rows, split_stride, num_splits, in_rows, acc, acc_rest, VALUE_DIM, DIMS, VALUE_REST
        )

    denominator = with_sinks(denominator, maximum, sinks_ptr, head, in_rows)
    result = value_scale / denominator
    out_rows = out_ptr + row_token * (num_kv_heads * GROUP * VALUE_DIM) + head * VALUE_DIM
    store_rows(out_rows, in_rows, acc * result[:, None], 0, DIMS, VALUE_DIM)
    if VALUE_REST > 0:
        store_rows(out_rows, in_rows, acc_rest * result[:, None], DIMS, VALUE_REST, VALUE_DIM)


@cache
def _constants(
    head_dim: int, group: int, block_size: int, query_len: int, reqs: int, block_n: int, window: int, soft_cap: float,
    fp8_cache: bool, native_fp8: bool, latent_dim: int,
) -> dict[str, Any]:  # fmt: skip
    """What the kernel is compiled for. query_len: tokens that a tile should hold if as many rows fit in registers."""
    dims, rest = head_parts(head_dim, fp8_cache, latent_dim)
    most_rows = 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16
    block_m = max(16, triton.next_power_of_2(group), min(most_rows, triton.next_power_of_2(query_len * group)))
    return {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIMS": dims,
        "REST": rest,
        "BLOCK_M": block_m,
        "BLOCK_Q": min(block_m // group, SHORT_QUERY.value),
        "BLOCK_N": block_n,
        "REQS": reqs,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "NATIVE_FP8": native_fp8,
        "LATENT_DIM": latent_dim,
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
) -> None:
    """The requests of up to SHORT_QUERY query tokens, to their places in out; arguments as `paged_attention` has them.

    config: block_n (keys of a tile; in 16 bits 32 or more, for with 16 keys every warp would compute all of it on the
    tensor cores), num_warps, num_stages, programs_per_sm (that the splits should make), min_split (tokens of a split,
    at least).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_reqs = seq_lens.shape[0]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    # Among long queries most short ones are decodes. A fixed split fixes the tile too, as rounding may depend on it.
    one_token = max_query_len > SHORT_QUERY.value or split_size > 0
    constants = _constants(
        head_dim, num_heads // num_kv_heads, block_size, 1 if one_token else max_query_len, requests_padded(num_reqs),
        config["block_n"], sliding_window, soft_cap, kv_scales is not None,
        fp8.has_native_decode(query.device), latent_dim,
    )  # fmt: skip
    block_n, block_q = constants["BLOCK_N"], constants["BLOCK_Q"]
    min_split = split_size or config["min_split"]
    tiles = min(num_reqs * -(-min(max_query_len, SHORT_QUERY.value) // block_q), num_tokens // block_q + num_reqs)
    items = tiles * -(-block_table.shape[1] * block_size // (-(-min_split // block_n) * block_n))
    if split_size > 0:
        target = _UNLIMITED
    else:
        target = max(1, config["programs_per_sm"] * num_multiprocessors(query.device) // num_kv_heads)
        items = min(items, target + tiles)
    rows = block_q * constants["GROUP"]
    partials = torch.empty(
        items * num_kv_heads * rows * (out.shape[2] + STATISTICS.value), dtype=torch.float32, device=query.device
    )
    decode_attention_kernel[(items, num_kv_heads)](
        query,
        kv_cache,
        out,
        block_table,
        query_start_loc,
        seq_lens,
        kv_scales,
        sinks,
        partials,
        arrival_counters(query.device, items * num_kv_heads),
        num_reqs,
        query.stride(0),
        kv_cache.stride(0),
        block_table.stride(0),
        scale,
        target,
        min_split,
        **constants,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; a few where Triton interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_TYPES = {
    "query_ptr": "",
    "kv_cache_ptr": "",
    "out_ptr": "",
    "block_table_ptr": "*i32",
    "query_start_loc_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "kv_scales_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    "partials_ptr": "*fp32",
    "arrived_ptr": "*i32",
    "num_reqs": "i32",
    "query_token_stride": "i32",
    "block_stride": "i32",
    "table_stride": "i32",
    "scale": "fp32",
    "target_items": "i32",
    "min_split": "i32",
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
    num_reqs: int = 1,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    latent_dim: int = 0,
) -> Specialization:
    """What `decode_attention` compiles for such a model and batch on a GPU of `capability` (90 for 9.0)."""
    fp8_cache = kv_dtype == torch.float8_e4m3fn
    types, absent = argument_types(_TYPES, dtype, fp8_cache, sinks)
    constants = _constants(
        head_dim, group, block_size, query_len, requests_padded(num_reqs), config["block_n"], sliding_window, soft_cap,
        fp8_cache, capability >= 89, latent_dim,
    )  # fmt: skip
    return Specialization(decode_attention_kernel, types, constants | absent, config["num_warps"], config["num_stages"])
