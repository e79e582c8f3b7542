"""rotary_embedding on CUDA, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotary_kernel(
    positions_ptr,
    query_ptr,
    key_ptr,
    cos_sin_ptr,  # fp32 [max_position, 2 * HALF]
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,  # heads per program, a power of two
):
    """Program (token, i): heads i * HEADS .. of query followed by key."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, HALF_PADDED)[None, :]
    in_dims = dims < HALF
    cos_sin = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF) + dims
    cos = tl.load(cos_sin, mask=in_dims, other=0.0)
    sin = tl.load(cos_sin + HALF, mask=in_dims, other=0.0)

    query = query_ptr + token * query_token_stride + head * query_head_stride + dims
    _rotate(query, cos, sin, (head < NUM_HEADS) & in_dims, HALF)
    key_head = head - NUM_HEADS
    key = key_ptr + token * key_token_stride + key_head * key_head_stride + dims
    _rotate(key, cos, sin, (key_head >= 0) & (key_head < NUM_KV_HEADS) & in_dims, HALF)


@triton.jit
def _rotate(pointers, cos, sin, mask, HALF: tl.constexpr):
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = pointers.dtype.element_ty
    tl.store(pointers, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(pointers + HALF, (second * cos + first * sin).to(dtype), mask=mask)


def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_dim: int) -> None:
    """As `reference.rotary_embedding`; query and key may be strided views with a contiguous last dimension."""
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, rotary_dim = key.shape[1], cos_sin_cache.shape[1]
    assert query.stride(2) == key.stride(2) == 1, "the last dimension of query and key must be contiguous"
    assert cos_sin_cache.dtype == torch.float32, "cos_sin_cache must be float32"
    assert cos_sin_cache.is_contiguous(), "cos_sin_cache must be contiguous"
    assert rotary_dim <= head_dim == query.shape[2] == key.shape[2], "head_dim does not match"
    if num_tokens == 0:
        return
    heads = min(16, triton.next_power_of_2(num_heads + num_kv_heads))
    rotary_kernel[(num_tokens, triton.cdiv(num_heads + num_kv_heads, heads))](
        positions,
        query,
        key,
        cos_sin_cache,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=rotary_dim // 2,
        HALF_PADDED=triton.next_power_of_2(rotary_dim // 2),
        HEADS=heads,
    )
