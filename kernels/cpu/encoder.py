"""The ops encoder_attention and rotate in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import F, I, L, P, bind, dtype_code, threads_for
from pagewire.kernels.ops import MAX_HEAD_DIM

__all__ = ["encoder_attention", "rotate"]

_encoder_attention = bind("encoder_attention", I, *[P] * 5, *[L] * 6, *[I] * 4, F, I, I)
_rotate = bind("rotate", I, P, P, L, L, P, *[I] * 2, L, I)


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
) -> Tensor:
    """Bitwise independent of the rest of the batch."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if key.shape != value.shape or key.shape != (num_tokens, num_kv_heads, head_dim) or num_heads % num_kv_heads:
        raise ValueError(
            f"encoder_attention: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "do not fit together"
        )
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"encoder_attention: head_dim {head_dim} must be a multiple of 8, at most {MAX_HEAD_DIM}")
    if query_start_loc.dtype is not torch.int32 or not query_start_loc.is_contiguous():
        raise TypeError("encoder_attention: query_start_loc must be contiguous int32")
    if not (query.stride(2) == key.stride(2) == value.stride(2) == 1 and query.dtype is key.dtype is value.dtype):
        raise ValueError("encoder_attention: heads of query, key and value must be contiguous, and of one dtype")
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    _encoder_attention(
        dtype_code(query),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        output.data_ptr(),
        query_start_loc.data_ptr(),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        query_start_loc.shape[0] - 1,
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        window,
        torch.get_num_threads(),
    )
    return output


def rotate(positions: Tensor, heads: Tensor, cos_sin_cache: Tensor) -> None:
    num_tokens, num_heads, head_dim = heads.shape
    rotary_dim = cos_sin_cache.shape[1]
    if heads.stride(2) != 1 or rotary_dim > head_dim:
        raise ValueError(f"rotate: heads {tuple(heads.shape)} must be contiguous, of {rotary_dim} elements at least")
    if positions.dtype is not torch.int64 or positions.shape != (num_tokens,) or not positions.is_contiguous():
        raise TypeError(f"rotate: positions must be contiguous int64 [{num_tokens}]")
    if cos_sin_cache.dtype is not torch.float32 or not cos_sin_cache.is_contiguous():
        raise TypeError("rotate: cos_sin_cache must be contiguous float32")
    _rotate(
        dtype_code(heads),
        positions.data_ptr(),
        heads.data_ptr(),
        heads.stride(0),
        heads.stride(1),
        cos_sin_cache.data_ptr(),
        rotary_dim,
        num_heads,
        num_tokens,
        threads_for(heads.numel()),
    )
