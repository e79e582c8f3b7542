"""Paged attention of long queries (more than SHORT_QUERY tokens): prompts and chunks of them, on any cached context.

A program computes the tile of BLOCK_Q query tokens of one request for the heads that share one KV head. The grid has an
upper bound of programs, as no length is read on the host: every program loads all lengths as one vector and finds its
request from the cumulative number of tiles; surplus programs return.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels import tuning
from pagewire.kernels.triton.attention.attention_tile import (
    NO_KEY,
    SHORT_QUERY,
    argument_types,
    attend,
    head_parts,
    in_order,
    load_query,
    store_rows,
    with_sinks,
    zero_parts,
)
from pagewire.kernels.triton.attention.page_descriptors import (
    attend_pages,
    can_describe,
    describe_pages,
    descriptor_type,
)
from pagewire.kernels.triton.attention.pages import load_blocks
from pagewire.kernels.triton.common import fp8
from pagewire.kernels.triton.common.request_tiles import requests_padded
from pagewire.kernels.triton.common.specialization import Specialization


@triton.jit(do_not_specialize=["num_reqs", "table_stride"])
def prefill_attention_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM], heads contiguous
    kv_cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], blocks contiguous; fp8 as uint8
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM] contiguous
    block_table_ptr,  # int32 [num_reqs, max_blocks]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    seq_lens_ptr,  # int32 [num_reqs]
    kv_scales_ptr,  # fp32 [2, num_kv_heads] of fp8, bf16 [num_blocks, 2, num_kv_heads, BLOCK_SIZE] of int8, or None
    sinks_ptr,  # fp32 [num_heads], or None
    pages,  # the KV cache as `page_descriptors.describe_pages` describes it, or None: keys are read by addresses
    num_reqs,
    query_token_stride,
    block_stride,  # bytes
    table_stride,
    scale,
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
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    PAGE_TOKENS: tl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    VALUE_DIM: tl.constexpr = LATENT_DIM if LATENT_DIM > 0 else HEAD_DIM
    VALUE_REST: tl.constexpr = 0 if LATENT_DIM > 0 else REST

    requests = tl.arange(0, REQS)
    in_batch = requests < num_reqs
    query_starts = tl.load(query_start_loc_ptr + requests, mask=in_batch, other=0)
    query_lens = tl.load(query_start_loc_ptr + requests + 1, mask=in_batch, other=0) - query_starts
    seq_lens = tl.load(seq_lens_ptr + requests, mask=in_batch, other=0)
    tiles = tl.where((query_lens > SHORT_QUERY) & (seq_lens > 0), tl.cdiv(query_lens, BLOCK_Q), 0)
    ends = tl.cumsum(tiles)
    if program >= tl.max(ends):
        return
    request = tl.sum((ends <= program).to(tl.int32))
    first_program = tl.max(tl.where(ends <= program, ends, 0))

    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    # Programs start in order. A request's last tile has the most keys, so it goes first and the end is even.
    tile = tl.cdiv(query_len, BLOCK_Q) - 1 - (program - first_program)
    first_token = tile * BLOCK_Q

    in_rows, token, head, row_token = rows_of_tile(
        query_start, query_len, first_token, kv_head, 0, GROUP, BLOCK_M, BLOCK_Q
    )
    query_rows = tl.multiple_of(row_token * query_token_stride + head * HEAD_DIM, 8)
    FP8_CACHE: tl.constexpr = kv_cache_ptr.dtype.element_ty == tl.uint8
    query = load_query(query_ptr, query_rows, in_rows, 0, DIMS, HEAD_DIM, True, FP8_CACHE)
    query_rest = query
    if REST > 0:
        query_rest = load_query(query_ptr, query_rows, in_rows, DIMS, REST, HEAD_DIM, True, FP8_CACHE)
    acc, acc_rest = zero_parts(BLOCK_M, DIMS, VALUE_REST, FP8_CACHE)
    maximum = tl.full([BLOCK_M], NO_KEY, dtype=tl.float32)
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    position = seq_len - query_len + token
    value_scale = 1.0
    if FP8_CACHE:
        scale *= tl.load(kv_scales_ptr + kv_head)
        value_scale = tl.load(kv_scales_ptr + num_kv_heads + kv_head)

    # Keys start .. end, of which every row sees entered .. masked.
    first_position = seq_len - query_len + first_token
    end = tl.minimum(seq_len, first_position + BLOCK_Q)
    start = 0
    entered = 0
    if WINDOW > 0:
        start = tl.maximum(first_position - WINDOW + 1, 0) // PAGE_TOKENS * PAGE_TOKENS
        entered = start + tl.cdiv(tl.maximum(end - WINDOW - start, 0), BLOCK_N) * BLOCK_N
    masked = start + (first_position + 1 - start) // BLOCK_N * BLOCK_N
    entered = tl.minimum(entered, masked)
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    head_offset = 0 if LATENT_DIM > 0 else kv_head * (BLOCK_SIZE * HEAD_DIM)
    value_offset = num_kv_heads * (BLOCK_SIZE * HEAD_DIM)
    # Tiles at the edges are narrower where the others leave few registers for their masks and addresses.
    EDGE_N: tl.constexpr = BLOCK_N if pages is None else BLOCK_N // 2
    masked_blocks = load_blocks(table_ptr, masked, end, BLOCK_SIZE, EDGE_N)
    if WINDOW > 0:
        blocks = load_blocks(table_ptr, start, end, BLOCK_SIZE, EDGE_N)
        for tile_start in tl.range(start, entered, EDGE_N, num_stages=1):
            following = load_blocks(table_ptr, tile_start + EDGE_N, end, BLOCK_SIZE, EDGE_N)
            acc, acc_rest, maximum, denominator = attend(
                query, query_rest, acc, acc_rest, maximum, denominator, kv_cache_ptr, kv_scales_ptr, kv_head,
                num_kv_heads, head_offset, blocks, tile_start, end, position, scale, block_stride, value_offset,
                BLOCK_SIZE, HEAD_DIM, DIMS, REST, EDGE_N, WINDOW, SOFT_CAP, "", NATIVE_FP8, LATENT_DIM, True,
            )  # fmt: skip
            blocks = following
    if pages is not None:
        acc, maximum, denominator = attend_pages(
            query, acc, maximum, denominator, pages, table_ptr, kv_head, num_kv_heads, entered, masked, position,
            scale, BLOCK_SIZE, HEAD_DIM, BLOCK_N, SOFT_CAP,
        )  # fmt: skip
    else:
        blocks = load_blocks(table_ptr, entered, end, BLOCK_SIZE, BLOCK_N)
        for tile_start in tl.range(entered, masked, BLOCK_N):
            following = load_blocks(table_ptr, tile_start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
            acc, acc_rest, maximum, denominator = attend(
                query, query_rest, acc, acc_rest, maximum, denominator, kv_cache_ptr, kv_scales_ptr, kv_head,
                num_kv_heads, head_offset, blocks, tile_start, end, position, scale, block_stride, value_offset,
                BLOCK_SIZE, HEAD_DIM, DIMS, REST, BLOCK_N, WINDOW, SOFT_CAP, "", NATIVE_FP8, LATENT_DIM, False,
            )  # fmt: skip
            blocks = following
    blocks = masked_blocks
    for tile_start in tl.range(masked, end, EDGE_N, num_stages=1):
        following = load_blocks(table_ptr, tile_start + EDGE_N, end, BLOCK_SIZE, EDGE_N)
        acc, acc_rest, maximum, denominator = attend(
            query, query_rest, acc, acc_rest, maximum, denominator, kv_cache_ptr, kv_scales_ptr, kv_head, num_kv_heads,
            head_offset, blocks, tile_start, end, position, scale, block_stride, value_offset, BLOCK_SIZE, HEAD_DIM,
            DIMS, REST, EDGE_N, WINDOW, SOFT_CAP, "", NATIVE_FP8, LATENT_DIM, True,
        )  # fmt: skip
        blocks = following
    acc, acc_rest = in_order(acc, acc_rest, FP8_CACHE)

    # The rows again: kept, they would take registers from the loops. Of a load the compiler cannot know that it is 0.
    unknown_zero = tl.load(query_start_loc_ptr + request, volatile=True) - query_start
    in_rows, token, head, row_token = rows_of_tile(
        query_start, query_len, first_token, kv_head, unknown_zero, GROUP, BLOCK_M, BLOCK_Q
    )
    denominator = with_sinks(denominator, maximum, sinks_ptr, head, in_rows)
    result = value_scale / denominator
    out_rows = out_ptr + row_token * (num_kv_heads * GROUP * VALUE_DIM) + head * VALUE_DIM
    store_rows(out_rows, in_rows, acc * result[:, None], 0, DIMS, VALUE_DIM)
    if VALUE_REST > 0:
        store_rows(out_rows, in_rows, acc_rest * result[:, None], DIMS, VALUE_REST, VALUE_DIM)


@triton.jit
def rows_of_tile(
    query_start, query_len, first_token, kv_head, first_row,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Returns, of the rows first_row .. first_row + BLOCK_M: which are used, their tokens in the request, their
    heads, and int64 their tokens in the batch."""
    rows = first_row + tl.arange(0, BLOCK_M)
    token = first_token + rows // GROUP
    in_rows = (rows < BLOCK_Q * GROUP) & (token < query_len)
    return in_rows, token, kv_head * GROUP + rows % GROUP, (query_start + token).to(tl.int64)


@cache
def _constants(
    head_dim: int, group: int, block_size: int, reqs: int, block_m: int, block_n: int, window: int, soft_cap: float,
    fp8_cache: bool, native_fp8: bool, latent_dim: int,
) -> dict[str, Any]:  # fmt: skip
    """What the kernel is compiled for."""
    dims, rest = head_parts(head_dim, fp8_cache, latent_dim)
    block_m = max(block_m, triton.next_power_of_2(group))
    return {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIMS": dims,
        "REST": rest,
        "BLOCK_M": block_m,
        "BLOCK_Q": block_m // group,
        "BLOCK_N": block_n,
        "REQS": reqs,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "NATIVE_FP8": native_fp8,
        "LATENT_DIM": latent_dim,
    }


def configuration(
    capability: int, shape: Mapping[str, int], kv_dtype: torch.dtype, sliding_window: int
) -> Mapping[str, int]:
    """Returns the configuration of the table for a shape (`tuning.lookup`). Where descriptors cannot be used, and with
    a window (its tiles leave too few registers for them): that of the smallest pages, which has none."""
    config = tuning.lookup("prefill_attention", capability, **shape)
    described = can_describe(shape["head_dim"], shape["block_size"], config["block_n"], kv_dtype, 0)
    if config["descriptors"] and (sliding_window or not described):
        config = tuning.lookup("prefill_attention", capability, **{**shape, "block_size": 1})
    if kv_dtype == torch.int8 and config["block_m"] >= 128:
        config = {**config, "num_warps": 8}  # as keys and values become 16 bits in registers, 4 warps have too few
    return config


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    config: Mapping[str, int],
    latent_dim: int = 0,
) -> None:
    """The requests of more than SHORT_QUERY query tokens, to their places in out; arguments as in `paged_attention`.

    config: block_m (rows of a tile), block_n (keys of a tile), descriptors (1: see
    `pagewire.kernels.triton.attention.page_descriptors`, where they can be; on sm_90 only), num_warps, num_stages.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_reqs = seq_lens.shape[0]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    constants = _constants(
        head_dim, num_heads // num_kv_heads, block_size, requests_padded(num_reqs), config["block_m"],
        config["block_n"], sliding_window, soft_cap, kv_cache.dtype == torch.uint8,
        fp8.has_native_decode(query.device), latent_dim,
    )  # fmt: skip
    described = config["descriptors"] and can_describe(
        head_dim, block_size, constants["BLOCK_N"], kv_cache.dtype, latent_dim
    )
    pages = describe_pages(kv_cache, constants["BLOCK_N"]) if described else None
    tiles = num_tokens // constants["BLOCK_Q"] + min(num_reqs, num_tokens // (SHORT_QUERY.value + 1))
    prefill_attention_kernel[(tiles, num_kv_heads)](
        query,
        kv_cache,
        out,
        block_table,
        query_start_loc,
        seq_lens,
        kv_scales,
        sinks,
        pages,
        num_reqs,
        query.stride(0),
        kv_cache.stride(0) * kv_cache.element_size(),
        block_table.stride(0),
        scale,
        **constants,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )


_TYPES = {
    "query_ptr": "",
    "kv_cache_ptr": "",
    "out_ptr": "",
    "block_table_ptr": "*i32",
    "query_start_loc_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "kv_scales_ptr": "",
    "sinks_ptr": "*fp32",
    "pages": "constexpr",
    "num_reqs": "i32",
    "query_token_stride": "i32",
    "block_stride": "i32",
    "table_stride": "i32",
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
    num_reqs: int = 1,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    latent_dim: int = 0,
) -> Specialization:
    """Returns what `prefill_attention` compiles for such a model and batch on a GPU of `capability` (90 for 9.0)."""
    fp8_cache = kv_dtype == torch.float8_e4m3fn
    types, none = argument_types(_TYPES, dtype, kv_dtype, sinks)
    constants = _constants(
        head_dim, group, block_size, requests_padded(num_reqs), config["block_m"], config["block_n"], sliding_window,
        soft_cap, fp8_cache, capability >= 89, latent_dim,
    )  # fmt: skip
    if config["descriptors"] and can_describe(head_dim, block_size, config["block_n"], kv_dtype, latent_dim):
        types["pages"] = descriptor_type(types["kv_cache_ptr"].removeprefix("*"), head_dim, config["block_n"])
    else:
        none["pages"] = None
    constants = constants | none  # not in place: they are cached
    return Specialization(prefill_attention_kernel, types, constants, config["num_warps"], config["num_stages"])
