"""The op store_kv on CUDA: write new keys and values to their slots of the paged cache. And what `rotary` shares of
that."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.fp8 import e4m3_from_fp32, has_native_encode
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

# Elements of one program. From MANY_TOKENS on there are programs enough to fill a GPU with larger ones.
TILE_ELEMENTS = 4096
MANY_TOKENS = 512
# Triton's types of a cache and its scales; "" is the dtype of keys.
CACHES = {"": ("", ""), "fp8": ("*u8", "*fp32"), "int8": ("*i8", "*bf16")}


@triton.jit
def slot_pointers(kv_cache_ptr, slots, heads, block_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the offset of each head's key in each slot (int64). A block's offset may exceed 2^31 elements."""
    block = (slots // BLOCK_SIZE) * block_stride
    return kv_cache_ptr + block + heads * (BLOCK_SIZE * HEAD_DIM) + (slots % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def head_scales(scales_ptr, heads, in_heads):
    """The scales of a tile's heads (both [HEADS]) as [1, HEADS, 1]; for a cache without scales of heads ones that are
    not used.

    (Functions that return None are for Triton from 3.7 on.)
    """
    if scales_ptr is None:
        scales = tl.full(heads.shape, 1.0, tl.float32)
    elif scales_ptr.dtype.element_ty == tl.float32:
        scales = tl.load(scales_ptr + heads, mask=in_heads, other=1.0)
    else:
        scales = tl.full(heads.shape, 1.0, tl.float32)
    return scales[None, :, None]


@triton.jit
def largest_of(x):
    """Returns fp32 [TOKENS, HEADS, 1]: the largest magnitude of each head's x [TOKENS, HEADS, dims]; NaN or infinite
    where a number is."""
    magnitudes = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers NaN are the largest
    return tl.max(magnitudes, axis=2, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def token_scales(largest):
    """Returns the scales of heads in int8 as `reference.quantized_rows` computes them, in fp32 that bf16 holds."""
    scales = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)) + largest * 0
    bits = scales.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(scales == scales, rounded, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def store_token_scales(
    scales_ptr, slots, heads, block_stride, of_keys, of_values, mask, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Stores the scales of heads with these largest numbers to their slots, and returns them; all are [TOKENS, HEADS,
    1]. block_stride: in bytes, as an int8 cache's elements."""
    pointers = scales_ptr + (slots // BLOCK_SIZE) * (block_stride // 2) + heads * BLOCK_SIZE + slots % BLOCK_SIZE
    of_keys, of_values = token_scales(of_keys), token_scales(of_values)
    tl.store(pointers, of_keys.to(tl.bfloat16), mask=mask)
    tl.store(pointers + NUM_KV_HEADS * BLOCK_SIZE, of_values.to(tl.bfloat16), mask=mask)
    return of_keys, of_values


@triton.jit
def to_cache(x, scales, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Computes x [TOKENS, HEADS, dims] as the cache stores it: divided by the scales, in an fp8 cache (uint8) as e4m3,
    in an int8 one rounded to the nearest integer."""
    if dtype == tl.uint8:
        stored = e4m3_from_fp32(tl.div_rn(x.to(tl.float32), scales), NATIVE_FP8)
    elif dtype == tl.int8:
        steps = tl.where(scales > 0, scales, 1.0)
        quotients = tl.div_rn(x.to(tl.float32), tl.broadcast_to(steps, x.shape))
        quotients = tl.minimum(tl.maximum(quotients, -127.0), 127.0)
        # 1.5 * 2^23: the sum has the integer in its lowest bits.
        stored = (quotients + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        stored = x.to(dtype)
    return stored


@triton.jit(do_not_specialize=["num_tokens"])
def store_kv_kernel(
    key_ptr,
    value_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    kv_scales_ptr,  # of a cache of 8 bits (fp8 as uint8), or None
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Program (i, j): tokens i * TOKENS .., heads j * HEADS .. ; tiles are [TOKENS, HEADS, HEAD_DIM].

    What there is once per token or head is loaded as such and spread afterwards: a load of spread pointers would be
    repeated for every element.
    """
    wait_for_inputs()
    launch_dependents()
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)[:, None, None]
    tokens = tokens[:, None, None]
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    in_heads = heads < NUM_KV_HEADS
    value_scales_ptr = None if kv_scales_ptr is None else kv_scales_ptr + NUM_KV_HEADS
    key_scales = head_scales(kv_scales_ptr, heads, in_heads)
    value_scales = head_scales(value_scales_ptr, heads, in_heads)
    heads, in_heads = heads[None, :, None], in_heads[None, :, None]
    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, None, :]
    mask = (slots >= 0) & in_heads & (dims < HEAD_DIM)
    key = tl.load(key_ptr + tokens * key_token_stride + heads * key_head_stride + dims, mask=mask)
    value = tl.load(value_ptr + tokens * value_token_stride + heads * value_head_stride + dims, mask=mask)
    target = slot_pointers(kv_cache_ptr, slots, heads, block_stride, BLOCK_SIZE, HEAD_DIM) + dims
    value_target = target + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    dtype: tl.constexpr = kv_cache_ptr.dtype.element_ty
    if dtype == tl.int8:
        largest, largest_value = largest_of(tl.where(mask, key, 0.0)), largest_of(tl.where(mask, value, 0.0))
        key_scales, value_scales = store_token_scales(
            kv_scales_ptr, slots, heads, block_stride, largest, largest_value, (slots >= 0) & in_heads, NUM_KV_HEADS,
            BLOCK_SIZE,
        )  # fmt: skip
    tl.store(target, to_cache(key, key_scales, dtype, NATIVE_FP8), mask=mask)
    tl.store(value_target, to_cache(value, value_scales, dtype, NATIVE_FP8), mask=mask)


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> None:
    """Computes `reference.store_kv`. Each page of kv_cache is contiguous; key and value may be strided views."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    num_tokens = slot_mapping.shape[0]
    assert key.shape == value.shape == (num_tokens, num_kv_heads, head_dim), "key and value do not fit the cache"
    assert key.stride(2) == value.stride(2) == 1, "the last dimension of key and value must be contiguous"
    stored = cache_view(kv_cache, slot_mapping, kv_scales)
    if num_tokens == 0:
        return
    native = stored.dtype == torch.uint8 and has_native_encode(kv_cache.device)
    constants, num_warps = _constants(num_kv_heads, head_dim, block_size, num_tokens >= MANY_TOKENS, native)
    grid = (triton.cdiv(num_tokens, constants["TOKENS"]), triton.cdiv(num_kv_heads, constants["HEADS"]))
    store_kv_kernel[grid](
        key,
        value,
        stored,
        slot_mapping,
        kv_scales,
        num_tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        **constants,
        num_warps=num_warps,
        **dependent_launch(key.device),
    )


def cache_view(kv_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> Tensor:
    """Checks what every launcher that writes the cache asks of these; returns the cache, an fp8 one as uint8."""
    _, two, num_kv_heads, block_size, head_dim = kv_cache.shape
    page = (num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1)
    assert two == 2, "kv_cache must be [num_blocks, 2, num_kv_heads, block_size, head_dim]"
    assert kv_cache.stride()[1:] == page, "pages must be contiguous"
    assert slot_mapping.dtype == torch.int64, "slot_mapping must be int64"
    assert slot_mapping.is_contiguous(), "slot_mapping must be contiguous"
    check_scales(kv_cache, kv_scales)
    return kv_cache.view(torch.uint8) if kv_cache.dtype == torch.float8_e4m3fn else kv_cache


def check_scales(kv_cache: Tensor, kv_scales: Tensor | None) -> None:
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    if kv_cache.dtype == torch.int8:
        assert kv_scales is not None, "an int8 cache needs kv_scales"
        assert kv_scales.dtype == torch.bfloat16, "kv_scales of int8 must be bfloat16"
        shape = (num_blocks, 2, num_kv_heads, block_size)
        assert kv_scales.shape == shape, "kv_scales of int8 must be [num_blocks, 2, num_kv_heads, block_size]"
        strides = (kv_cache.stride(0) // 2, num_kv_heads * block_size, block_size, 1)
        assert kv_scales.stride() == strides, "kv_scales of int8 must lie in the blocks"
        return
    is_fp8 = kv_cache.dtype == torch.float8_e4m3fn
    assert is_fp8 == (kv_scales is not None), "kv_scales belong to a cache of 8 bits, which needs them"
    if kv_scales is not None:
        assert kv_scales.dtype == torch.float32, "kv_scales must be float32"
        assert kv_scales.shape == (2, num_kv_heads), "kv_scales must be [2, num_kv_heads]"
        assert kv_scales.is_contiguous(), "kv_scales must be contiguous"


def tile_heads(num_heads: int) -> int:
    """Heads per program: a power of two up to 8 that leaves at most a fifth of the lanes without a head."""
    return next(heads for heads in (8, 4, 2, 1) if triton.cdiv(num_heads, heads) * heads * 4 <= num_heads * 5)


def tile_tokens(heads: int, dims: int, many_tokens: bool) -> int:
    """Tokens per program: one where there are few, so that they spread over the GPU."""
    return min(16, max(1, TILE_ELEMENTS // (heads * dims))) if many_tokens else 1


@lru_cache
def _constants(
    num_kv_heads: int, head_dim: int, block_size: int, many_tokens: bool, native_fp8: bool
) -> tuple[dict[str, Any], int]:
    heads, dims = tile_heads(num_kv_heads), triton.next_power_of_2(head_dim)
    tokens = tile_tokens(heads, dims, many_tokens)
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TOKENS": tokens,
        "HEADS": heads,
        "NATIVE_FP8": native_fp8,
    }
    # Two 16-byte loads of 2-byte elements per lane, for each of key and value.
    return constants, min(8, max(1, tokens * heads * dims // 512))


def specialization(
    dtype: str,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    many_tokens: bool = True,
    cache: str = "",
    native_fp8: bool = False,
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `store_kv` launches (kernel, argument types, constants, num_warps), to compile it ahead of time.

    dtype is Triton's name of the keys' type, cache one of CACHES; many_tokens says whether there are MANY_TOKENS or
    more.
    """
    types = {
        "key_ptr": f"*{dtype}",
        "value_ptr": f"*{dtype}",
        "kv_cache_ptr": CACHES[cache][0] or f"*{dtype}",
        "slot_mapping_ptr": "*i64",
        **({"kv_scales_ptr": CACHES[cache][1]} if cache else {}),
        "num_tokens": "i32",
        "key_token_stride": "i32",
        "key_head_stride": "i32",
        "value_token_stride": "i32",
        "value_head_stride": "i32",
        "block_stride": "i32",
    }
    constants, num_warps = _constants(num_kv_heads, head_dim, block_size, many_tokens, native_fp8)
    return store_kv_kernel, types, constants if cache else {**constants, "kv_scales_ptr": None}, num_warps
