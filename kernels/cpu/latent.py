"""The ops latent_attention, rotary_store_latent and head_linear in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import F, I, L, P, bind, dtype_code, threads_for
from pagewire.kernels.cpu.runtime.library import norm_weight as norm_address
from pagewire.kernels.ops import MAX_LATENT_DIM

__all__ = ["head_linear", "latent_attention", "rotary_store_latent"]

# Tokens up to which reading the weights directly beats torch's blocked product.
_MAX_DIRECT_TOKENS = 16

_latent_attention = bind("latent_attention", I, *[P] * 6, *[L] * 4, *[I] * 5, F, I)
_rotary_store_latent = bind("rotary_store_latent", I, P, P, L, L, P, L, L, P, L, P, P, F, I, P, P, L, *[I] * 4, L, I)
_head_linear = bind("head_linear", I, P, L, L, P, L, L, L, P, L, L, *[I] * 3, L, I)


def _check_cache(op: str, kv_cache: Tensor, dtype: torch.dtype, width: int) -> tuple[int, int]:
    """(block_size, block stride)"""
    _, block_size, cache_width = kv_cache.shape
    if kv_cache.dtype is not dtype or cache_width != width or kv_cache.stride()[1:] != (width, 1):
        raise ValueError(
            f"{op}: kv_cache must be {dtype} [num_blocks, block_size, {width}], each block contiguous, not "
            f"{kv_cache.dtype} {tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    return block_size, kv_cache.stride(0)


def latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    scale: float,
    latent_dim: int,
    split_size: int,
    plan: Tensor | None,
) -> Tensor:
    """Bitwise independent of the rest of the batch at any split_size, as `paged_attention`."""
    num_tokens, num_heads, width = query.shape
    token_stride, head_stride, element_stride = query.stride()
    block_size, block_stride = _check_cache("latent_attention", kv_cache, query.dtype, width)
    if element_stride != 1:
        raise ValueError("latent_attention: the last dimension of query must be contiguous")
    if not 0 < latent_dim <= width <= MAX_LATENT_DIM or latent_dim % 8 or width % 8:
        raise ValueError(
            f"latent_attention: latent_dim {latent_dim} and the size of a head {width} must be multiples of 8, at most "
            f"{MAX_LATENT_DIM}"
        )
    if not (block_table.dtype is query_start_loc.dtype is seq_lens.dtype is torch.int32):
        raise TypeError("latent_attention: block_table, query_start_loc and seq_lens must be int32")
    table_stride, table_element_stride = block_table.stride()
    if not (table_element_stride == 1 and query_start_loc.is_contiguous() and seq_lens.is_contiguous()):
        raise ValueError("latent_attention: block_table rows, query_start_loc and seq_lens must be contiguous")
    output = torch.empty((num_tokens, num_heads, latent_dim), dtype=query.dtype)
    _latent_attention(
        dtype_code(query),
        query.data_ptr(),
        kv_cache.data_ptr(),
        output.data_ptr(),
        block_table.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        token_stride,
        head_stride,
        block_stride,
        table_stride,
        seq_lens.shape[0],
        num_heads,
        width,
        latent_dim,
        block_size,
        scale,
        torch.get_num_threads(),
    )
    return output


def rotary_store_latent(
    positions: Tensor,
    q: Tensor,
    query: Tensor,
    latent: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    num_tokens, num_heads, width = query.shape
    latent_dim, rotary_dim = norm_weight.shape[0], cos_sin_cache.shape[1]
    block_size, block_stride = _check_cache("rotary_store_latent", kv_cache, query.dtype, latent_dim + rotary_dim)
    if width != latent_dim + rotary_dim or latent.shape != (num_tokens, width) or q.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"rotary_store_latent: q {tuple(q.shape)}, query {tuple(query.shape)} and latent {tuple(latent.shape)} do "
            f"not fit a latent part of {latent_dim} and a rotary part of {rotary_dim} elements"
        )
    if not (q.stride(2) == query.stride(2) == latent.stride(1) == 1 and q.dtype is query.dtype is latent.dtype):
        raise ValueError("rotary_store_latent: q, query and latent must be of one dtype, the last dimension contiguous")
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        if tensor.dtype is not torch.int64 or tensor.shape != (num_tokens,) or not tensor.is_contiguous():
            raise TypeError(f"rotary_store_latent: {name} must be contiguous int64 [{num_tokens}]")
    if cos_sin_cache.dtype is not torch.float32 or rotary_dim % 2 or not cos_sin_cache.is_contiguous():
        raise ValueError("rotary_store_latent: cos_sin_cache must be contiguous float32 with an even number of columns")
    element_size = query.element_size()
    _rotary_store_latent(
        dtype_code(query),
        positions.data_ptr(),
        q.data_ptr() + (q.shape[2] - rotary_dim) * element_size,
        q.stride(0),
        q.stride(1),
        query.data_ptr() + latent_dim * element_size,
        query.stride(0),
        query.stride(1),
        latent.data_ptr(),
        latent.stride(0),
        cos_sin_cache.data_ptr(),
        norm_address(norm_weight, latent_dim, query.dtype),
        eps,
        interleaved,
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        block_stride,
        block_size,
        num_heads,
        latent_dim,
        rotary_dim,
        num_tokens,
        threads_for(q.numel()),
    )


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    num_tokens, num_heads, in_features = x.shape
    out_features = out.shape[2]
    if weight.shape != (num_heads, out_features, in_features) or out.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"head_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} must be "
            "[num_tokens, num_heads, K], [num_heads, N, K] and [num_tokens, num_heads, N]"
        )
    if not (x.dtype is weight.dtype is out.dtype and x.stride(2) == out.stride(2) == 1 and 1 in weight.stride()[1:]):
        raise ValueError("head_linear: x, weight and out must be of one dtype, with elements side by side")
    if num_tokens > _MAX_DIRECT_TOKENS:
        out.copy_(torch.matmul(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))
        return
    _head_linear(
        dtype_code(x),
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        weight.data_ptr(),
        *weight.stride(),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        num_heads,
        in_features,
        out_features,
        num_tokens,
        threads_for(weight.numel()),
    )
