"""Tiles of keys that every row of queries sees, two of them in flight: while one tile's scores become weights, the
tensor cores multiply the weights of the tile before by its values.

In `attend` every step of a tile waits for the last one, so the tensor cores of a program idle for as long as its
softmax takes. Here a tile's values are multiplied one tile later. In the order

    scores of tile i, correction of the sums, weights of tile i - 1 @ its values, weights of tile i

the last two do not depend on each other, and on sm_90 the product goes on beside the exponentials. This is the overlap
within a warp group of FlashAttention-3 (https://arxiv.org/abs/2407.08608, section 3.2). What it asks of Triton is that
nobody looks at the product's result before the next scores are there: then no wait follows it
(`dotCanBeProperlyAsync` in Triton's WGMMAPipeline.cpp), which `benchmarks.kernels.prefill_counts` verifies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import (
    load_keys,
    load_values,
    weigh,
)
from pagewire.kernels.triton.attention.pages import load_blocks, page_offsets, page_pointers


@triton.jit
def attend_overlapped(
    query,  # the arguments are those of `attend`
    query_rest,
    acc,
    acc_rest,
    maximum,
    denominator,
    cache_ptr,
    head_offset,
    table_ptr,  # int32 [pages], the request's block ids
    start,
    stop,  # keys start .. stop, a whole number of tiles
    position,
    scale,
    block_stride,  # bytes
    value_offset,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """acc, acc_rest, maximum and denominator with the keys start .. stop, which may be none."""
    blocks = load_blocks(table_ptr, start, stop, BLOCK_SIZE, BLOCK_N)
    # Before the first tile there is none: its own values count for it, with weights of 0.
    pointers = page_pointers(cache_ptr, blocks, start, block_stride, BLOCK_SIZE, HEAD_DIM, BLOCK_N)
    offsets = page_offsets(BLOCK_SIZE, HEAD_DIM, BLOCK_N) + head_offset
    # Weights are kept in fp32: only of a conversion in the iteration of the product Triton knows that it may go on.
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    correction = tl.full([BLOCK_M], 1.0, tl.float32)
    for tile_start in tl.range(start, stop, BLOCK_N):
        following = load_blocks(table_ptr, tile_start + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N)
        value, value_rest = load_values(
            pointers, offsets + value_offset, None, DIMS, REST, HEAD_DIM, False, "", query.dtype, NATIVE_FP8
        )
        pointers = page_pointers(cache_ptr, blocks, tile_start, block_stride, BLOCK_SIZE, HEAD_DIM, BLOCK_N)
        key = load_keys(pointers, offsets, None, 0, DIMS, HEAD_DIM, False, "", query.dtype, NATIVE_FP8)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if REST > 0:
            key = load_keys(pointers, offsets, None, DIMS, REST, HEAD_DIM, False, "", query.dtype, NATIVE_FP8)
            scores = tl.dot(query_rest, tl.trans(key), scores, input_precision="ieee")
        acc, acc_rest = add_values(acc, acc_rest, weights, correction, value, value_rest)
        keys = tile_start + tl.arange(0, BLOCK_N)
        weights, maximum, correction = weigh(scores, maximum, keys, position, scale, 0, SOFT_CAP, False)
        denominator = denominator * correction + tl.sum(weights, axis=1)
        blocks = following
    if start < stop:
        value, value_rest = load_values(
            pointers, offsets + value_offset, None, DIMS, REST, HEAD_DIM, False, "", query.dtype, NATIVE_FP8
        )
        acc, acc_rest = add_values(acc, acc_rest, weights, correction, value, value_rest)
    return acc, acc_rest, maximum, denominator


@triton.jit
def add_values(acc, acc_rest, weights, correction, value, value_rest):
    """acc and acc_rest, corrected, and the weighted values of a tile."""
    weights = weights.to(value.dtype)
    acc = tl.dot(weights, value, acc * correction[:, None], input_precision="ieee")
    if len(acc_rest.shape) == 2:
        acc_rest = tl.dot(weights, value_rest, acc_rest * correction[:, None], input_precision="ieee")
    return acc, acc_rest
