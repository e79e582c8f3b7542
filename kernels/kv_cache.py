"""store_kv on CUDA: write new keys and values to their slots of the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_kv_kernel(
    key_ptr,
    value_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    head_stride,  # of kv_cache: block_size * head_dim
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # NUM_KV_HEADS, rounded up to a power of two
    DIMS: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    key = tl.load(key_ptr + token * key_token_stride + heads * key_head_stride + dims, mask=mask)
    value = tl.load(value_ptr + token * value_token_stride + heads * value_head_stride + dims, mask=mask)
    block = (slot // BLOCK_SIZE) * block_stride
    target = kv_cache_ptr + block + heads * head_stride + (slot % BLOCK_SIZE) * HEAD_DIM + dims
    dtype = kv_cache_ptr.dtype.element_ty
    tl.store(target, key.to(dtype), mask=mask)
    tl.store(target + NUM_KV_HEADS * head_stride, value.to(dtype), mask=mask)


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `reference.store_kv`. Each page of kv_cache is contiguous; key and value may be strided views."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert kv_cache.stride()[2:] == (block_size * head_dim, head_dim, 1), "pages must be contiguous"
    assert key.stride(2) == value.stride(2) == 1, "the last dimension of key and value must be contiguous"
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    store_kv_kernel[(num_tokens,)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(num_kv_heads),
        DIMS=triton.next_power_of_2(head_dim),
    )
