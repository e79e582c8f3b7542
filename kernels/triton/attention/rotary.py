"""The op rotary_store_kv on CUDA: q/k norm, rotary embedding and KV write in one pass over the projection's output.

Every element is read once and written once: query heads in place, key and value heads to the cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.kv_cache import (
    CACHES,
    MANY_TOKENS,
    cache_view,
    head_scales,
    largest_of,
    slot_pointers,
    store_token_scales,
    tile_heads,
    tile_tokens,
    to_cache,
)
from pagewire.kernels.triton.common.fp8 import has_native_encode
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs


@triton.jit
def _rotated(
    pointers,  # [TOKENS, HEADS, 1], where each head begins
    mask,  # [TOKENS, HEADS, 1]
    cos,  # fp32 [TOKENS, 1, HALF]
    sin,
    weight_ptr,  # [HEAD_DIM] or None
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Heads normalised and rotated, in their own dtype: elements [0, HALF), [HALF, 2 * HALF), [2 * HALF, HEAD_DIM).

    Without a rest (HEAD_DIM = 2 * HALF) the third is a copy of the first that is not used.
    """
    dtype: tl.constexpr = pointers.dtype.element_ty
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    in_half = dims < HALF
    first = tl.load(pointers + dims, mask=mask & in_half, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF + dims, mask=mask & in_half, other=0.0).to(tl.float32)
    rest = first
    if HEAD_DIM > 2 * HALF:
        rest_dims = 2 * HALF + tl.arange(0, triton.next_power_of_2(HEAD_DIM - 2 * HALF))[None, None, :]
        in_rest = rest_dims < HEAD_DIM
        rest = tl.load(pointers + rest_dims, mask=mask & in_rest, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=2, keep_dims=True)
        if HEAD_DIM > 2 * HALF:
            squares += tl.sum(rest * rest, axis=2, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        first = _weighted(first * scale, weight_ptr + dims, in_half, dtype)
        second = _weighted(second * scale, weight_ptr + HALF + dims, in_half, dtype)
        if HEAD_DIM > 2 * HALF:
            rest = _weighted(rest * scale, weight_ptr + rest_dims, in_rest, dtype)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype), rest.to(dtype)


@triton.jit
def _weighted(normed, weight_pointers, mask, dtype: tl.constexpr):
    """normed * weight in fp32, rounded before and after the product as in reference.rms_norm."""
    weight_dtype: tl.constexpr = weight_pointers.dtype.element_ty
    weight = tl.load(weight_pointers, mask=mask, other=0.0).to(tl.float32)
    return (normed.to(weight_dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _rotate_queries(
    rows,  # [TOKENS, 1, 1], where each token's query heads begin
    in_tokens,
    cos,
    sin,
    tile,
    head_stride,
    weight_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One tile of query heads, in place."""
    heads = (tile * HEADS + tl.arange(0, HEADS))[None, :, None]
    mask = in_tokens & (heads < NUM_HEADS)
    query = rows + heads * head_stride
    first, second, rest = _rotated(query, mask, cos, sin, weight_ptr, eps, HEAD_DIM, HALF)
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    tl.store(query + dims, first, mask=mask & (dims < HALF))
    tl.store(query + HALF + dims, second, mask=mask & (dims < HALF))
    if weight_ptr is not None and HEAD_DIM > 2 * HALF:
        rest_dims = 2 * HALF + tl.arange(0, triton.next_power_of_2(HEAD_DIM - 2 * HALF))[None, None, :]
        tl.store(query + rest_dims, rest, mask=mask & (rest_dims < HEAD_DIM))


@triton.jit
def _store_keys_values(
    rows,  # [TOKENS, 1, 1], where each token's key heads begin
    slots,  # [TOKENS, 1, 1], -1 = padding
    cos,
    sin,
    tile,
    kv_cache_ptr,
    head_stride,
    block_stride,
    weight_ptr,
    kv_scales_ptr,
    eps,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """One tile of key heads, rotated, and the value heads of the same index, to the cache."""
    heads = tile * HEADS + tl.arange(0, HEADS)
    in_heads = heads < NUM_KV_HEADS
    value_scales_ptr = None if kv_scales_ptr is None else kv_scales_ptr + NUM_KV_HEADS
    key_scales = head_scales(kv_scales_ptr, heads, in_heads)
    value_scales = head_scales(value_scales_ptr, heads, in_heads)
    heads = heads[None, :, None]
    mask = (slots >= 0) & in_heads[None, :, None]
    key = rows + heads * head_stride
    target = slot_pointers(kv_cache_ptr, slots, heads, block_stride, BLOCK_SIZE, HEAD_DIM)
    dtype: tl.constexpr = kv_cache_ptr.dtype.element_ty

    all_dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, None, :]
    in_value = mask & (all_dims < HEAD_DIM)
    value = tl.load(key + NUM_KV_HEADS * head_stride + all_dims, mask=in_value)
    first, second, rest = _rotated(key, mask, cos, sin, weight_ptr, eps, HEAD_DIM, HALF)

    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    if dtype == tl.int8:
        largest = tl.maximum(largest_of(first), largest_of(second))
        if HEAD_DIM > 2 * HALF:
            largest = tl.maximum(largest, largest_of(rest))
        largest_value = largest_of(tl.where(in_value, value, 0.0))
        key_scales, value_scales = store_token_scales(
            kv_scales_ptr, slots, heads, block_stride, largest, largest_value, mask, NUM_KV_HEADS, BLOCK_SIZE
        )
    tl.store(target + dims, to_cache(first, key_scales, dtype, NATIVE_FP8), mask=mask & (dims < HALF))
    tl.store(target + HALF + dims, to_cache(second, key_scales, dtype, NATIVE_FP8), mask=mask & (dims < HALF))
    if HEAD_DIM > 2 * HALF:
        rest_dims = 2 * HALF + tl.arange(0, triton.next_power_of_2(HEAD_DIM - 2 * HALF))[None, None, :]
        tl.store(target + rest_dims, to_cache(rest, key_scales, dtype, NATIVE_FP8), mask=mask & (rest_dims < HEAD_DIM))
    value_target = target + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + all_dims
    tl.store(value_target, to_cache(value, value_scales, dtype, NATIVE_FP8), mask=in_value)


@triton.jit(do_not_specialize=["num_tokens"])
def rotary_store_kv_kernel(
    positions_ptr,
    qkv_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    cos_sin_ptr,  # fp32 [max_position, 2 * HALF]
    kv_cache_ptr,
    slot_mapping_ptr,
    q_weight_ptr,  # or None
    k_weight_ptr,  # or None
    kv_scales_ptr,  # of a cache of 8 bits (fp8 as uint8), or None
    num_tokens,
    token_stride,
    head_stride,
    block_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,  # query heads per program
    KV_HEADS: tl.constexpr,  # key heads per program, and as many value heads
    NATIVE_FP8: tl.constexpr,
):
    """Program (i, j): tokens i * TOKENS .. of one tile of heads; the tiles of query heads come first.

    Tiles are [TOKENS, heads, dims]. cos and sin are loaded once for all heads of a tile.
    """
    wait_for_inputs()
    launch_dependents()
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_tokens = tokens < num_tokens
    # Loaded as [TOKENS] and spread afterwards: a load of spread pointers would be repeated for every element.
    positions = tl.load(positions_ptr + tokens, mask=in_tokens, other=0)[:, None, None]
    slots = tl.load(slot_mapping_ptr + tokens, mask=in_tokens, other=-1)[:, None, None]
    tokens, in_tokens = tokens[:, None, None], in_tokens[:, None, None]
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    cos_sin = cos_sin_ptr + positions * (2 * HALF) + dims
    cos = tl.load(cos_sin, mask=in_tokens & (dims < HALF), other=0.0)
    sin = tl.load(cos_sin + HALF, mask=in_tokens & (dims < HALF), other=0.0)

    rows = qkv_ptr + tokens * token_stride
    tile = tl.program_id(1)
    query_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if tile < query_tiles:
        _rotate_queries(
            rows, in_tokens, cos, sin, tile, head_stride, q_weight_ptr, eps, NUM_HEADS, HEAD_DIM, HALF, HEADS
        )
    else:
        _store_keys_values(
            rows + NUM_HEADS * head_stride, slots, cos, sin, tile - query_tiles, kv_cache_ptr, head_stride,
            block_stride, k_weight_ptr, kv_scales_ptr, eps, NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_SIZE, KV_HEADS,
            NATIVE_FP8,
        )  # fmt: skip


def rotary_store_kv(
    positions: Tensor,
    qkv: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    kv_scales: Tensor | None,
) -> None:
    """Computes `reference.rotary_store_kv`. qkv may have any stride between tokens and heads; pages are contiguous."""
    num_tokens, all_heads, head_dim = qkv.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    rotary_dim = cos_sin_cache.shape[1]
    assert positions.dtype == torch.int64, "positions must be int64"
    assert positions.is_contiguous(), "positions must be contiguous"
    assert positions.shape == slot_mapping.shape == (num_tokens,), "one position and one slot per token"
    assert qkv.stride(2) == 1, "the last dimension of qkv must be contiguous"
    assert all_heads > 2 * num_kv_heads, "qkv must have query, key and value heads"
    assert head_dim == kv_cache.shape[4], "qkv and kv_cache differ in head_dim"
    assert cos_sin_cache.dtype == torch.float32, "cos_sin_cache must be float32"
    assert cos_sin_cache.is_contiguous(), "cos_sin_cache must be contiguous"
    assert 0 < rotary_dim <= head_dim, "rotary_dim must be in 1 .. head_dim"
    assert rotary_dim % 2 == 0, "rotary_dim must be even"
    assert (q_weight is None) == (k_weight is None), "query and key are both normalised or neither"
    for weight in (q_weight, k_weight):
        assert weight is None or (weight.shape == (head_dim,) and weight.is_contiguous()), "a weight is [head_dim]"
    stored = cache_view(kv_cache, slot_mapping, kv_scales)
    if num_tokens == 0:
        return
    num_heads = all_heads - 2 * num_kv_heads
    native = stored.dtype == torch.uint8 and has_native_encode(qkv.device)
    many_tokens = num_tokens >= MANY_TOKENS
    constants, num_warps = _constants(num_heads, num_kv_heads, head_dim, rotary_dim, block_size, many_tokens, native)
    query_tiles = triton.cdiv(num_heads, constants["HEADS"])
    grid = (
        triton.cdiv(num_tokens, constants["TOKENS"]),
        query_tiles + triton.cdiv(num_kv_heads, constants["KV_HEADS"]),
    )
    rotary_store_kv_kernel[grid](
        positions,
        qkv,
        cos_sin_cache,
        stored,
        slot_mapping,
        q_weight,
        k_weight,
        kv_scales,
        num_tokens,
        qkv.stride(0),
        qkv.stride(1),
        kv_cache.stride(0),
        eps,
        **constants,
        num_warps=num_warps,
        **dependent_launch(qkv.device),
    )


@lru_cache
def _constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    many_tokens: bool,
    native_fp8: bool,
) -> tuple[dict[str, Any], int]:
    heads, dims = tile_heads(num_heads), triton.next_power_of_2(head_dim)
    tokens = tile_tokens(heads, dims, many_tokens)
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": rotary_dim // 2,
        "BLOCK_SIZE": block_size,
        "TOKENS": tokens,
        "HEADS": heads,
        "KV_HEADS": tile_heads(num_kv_heads),
        "NATIVE_FP8": native_fp8,
    }
    # Four 16-byte loads of 2-byte elements per lane, two of each half of the heads.
    return constants, min(8, max(1, tokens * heads * dims // 1024))


def specialization(
    dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int = 16,
    many_tokens: bool = True,
    norm: str | None = None,
    cache: str = "",
    native_fp8: bool = False,
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `rotary_store_kv` launches (kernel, argument types, constants, num_warps), to compile it ahead of
    time.

    dtype is Triton's name of qkv's type, norm that of the norms' weights, if there are; many_tokens says whether there
    are MANY_TOKENS or more. cache: one of CACHES.
    """
    types = {
        "positions_ptr": "*i64",
        "qkv_ptr": f"*{dtype}",
        "cos_sin_ptr": "*fp32",
        "kv_cache_ptr": CACHES[cache][0] or f"*{dtype}",
        "slot_mapping_ptr": "*i64",
        "q_weight_ptr": f"*{norm}",
        "k_weight_ptr": f"*{norm}",
        "kv_scales_ptr": CACHES[cache][1],
        "num_tokens": "i32",
        "token_stride": "i32",
        "head_stride": "i32",
        "block_stride": "i32",
        "eps": "fp32",
    }
    absent = (() if norm else ("q_weight_ptr", "k_weight_ptr")) + (() if cache else ("kv_scales_ptr",))
    constants, num_warps = _constants(
        num_heads, num_kv_heads, head_dim, rotary_dim, block_size, many_tokens, native_fp8
    )
    present = {name: kind for name, kind in types.items() if name not in absent}
    return rotary_store_kv_kernel, present, {**constants, **dict.fromkeys(absent)}, num_warps
