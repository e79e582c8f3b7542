"""The ops paged_attention, store_kv and rotary_store_kv in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import (
    FLOAT8,
    INT8,
    F,
    I,
    L,
    P,
    bind,
    dtype_code,
    narrowed_dtype,
    norm_weight,
    threads_for,
)
from pagewire.kernels.ops import MAX_HEAD_DIM

__all__ = ["paged_attention", "rotary_store_kv", "store_kv"]

_CODES = {torch.float8_e4m3fn: FLOAT8, torch.int8: INT8}

_paged_attention = bind("paged_attention", I, I, I, *[P] * 8, *[L] * 4, *[I] * 5, F, I, F, I)
_store_kv = bind("store_kv", I, I, P, P, *[L] * 4, P, P, P, L, *[I] * 3, L, I)
_rotary_store_kv = bind("rotary_store_kv", I, I, I, P, P, L, L, P, I, P, P, F, P, P, P, L, *[I] * 4, L, I)


def _check_cache(op: str, kv_cache: Tensor) -> tuple[int, int, int, int]:
    """Returns (num_kv_heads, block_size, head_dim, block stride); pages must be contiguous, with any stride between."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    strides = kv_cache.stride()
    head_stride = block_size * head_dim
    if strides[1:] != (num_kv_heads * head_stride, head_stride, head_dim, 1):
        raise ValueError(f"{op}: each page of kv_cache must be contiguous, its strides are {strides}")
    return num_kv_heads, block_size, head_dim, strides[0]


def _form(op: str, kv_cache: Tensor, dtype: torch.dtype, kv_scales: Tensor | None) -> tuple[int, int | None]:
    """Returns the code of what the cache holds, and the address of kv_scales; None if it holds `dtype` itself, or 16
    bits of what is fp32."""
    if kv_scales is None:
        if kv_cache.dtype is not dtype and (dtype is not torch.float32 or kv_cache.dtype in _CODES):
            raise TypeError(f"{op}: without kv_scales kv_cache must be {dtype} as what it holds, not {kv_cache.dtype}")
        return dtype_code(kv_cache), None
    if kv_cache.dtype not in _CODES:
        raise TypeError(f"{op}: with kv_scales kv_cache must be float8_e4m3fn or int8, not {kv_cache.dtype}")
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    if kv_cache.dtype is torch.int8:
        strides = (kv_cache.stride(0) // 2, num_kv_heads * block_size, block_size, 1)
        shape = (num_blocks, 2, num_kv_heads, block_size)
        if kv_scales.dtype is not torch.bfloat16 or kv_scales.shape != shape or kv_scales.stride() != strides:
            raise ValueError(
                f"{op}: kv_scales of int8 must be bfloat16 {shape} with strides {strides}, not {kv_scales.dtype} "
                f"{tuple(kv_scales.shape)} with {kv_scales.stride()}"
            )
    elif kv_scales.dtype is not torch.float32 or kv_scales.shape != (2, num_kv_heads) or not kv_scales.is_contiguous():
        raise ValueError(
            f"{op}: kv_scales must be contiguous float32 [2, {num_kv_heads}], not {kv_scales.dtype} "
            f"{tuple(kv_scales.shape)}"
        )
    return _CODES[kv_cache.dtype], kv_scales.data_ptr()


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    split_size: int,
    plan: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Bitwise independent of the rest of the batch at any split_size: keys are reduced in ranges of a fixed size."""
    _, num_heads, head_dim = query.shape
    token_stride, head_stride, element_stride = query.stride()
    num_kv_heads, block_size, cache_head_dim, block_stride = _check_cache("paged_attention", kv_cache)
    form, scales = _form("paged_attention", kv_cache, query.dtype, kv_scales)
    if sinks is not None and (sinks.dtype is not torch.float32 or sinks.shape != (num_heads,)):
        raise ValueError(
            f"paged_attention: sinks must be float32 [{num_heads}], not {sinks.dtype} {tuple(sinks.shape)}"
        )
    if element_stride != 1:
        raise ValueError("paged_attention: the last dimension of query must be contiguous")
    if head_dim != cache_head_dim or head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"paged_attention: head_dim {head_dim} must be that of kv_cache ({cache_head_dim}), a multiple of 8 "
            f"and at most {MAX_HEAD_DIM}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"paged_attention: {num_heads} heads cannot share {num_kv_heads} KV heads evenly")
    if not (block_table.dtype is query_start_loc.dtype is seq_lens.dtype is torch.int32):
        raise TypeError("paged_attention: block_table, query_start_loc and seq_lens must be int32")
    table_stride, table_element_stride = block_table.stride()
    if not (table_element_stride == 1 and query_start_loc.is_contiguous() and seq_lens.is_contiguous()):
        raise ValueError("paged_attention: block_table rows, query_start_loc and seq_lens must be contiguous")
    output = torch.empty(query.shape, dtype=narrowed_dtype("paged_attention", query, dtype))
    _paged_attention(
        dtype_code(query),
        dtype_code(output),
        form,
        query.data_ptr(),
        kv_cache.data_ptr(),
        output.data_ptr(),
        block_table.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        scales,
        None if sinks is None else sinks.data_ptr(),
        token_stride,
        head_stride,
        block_stride,
        table_stride,
        seq_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        scale,
        sliding_window,
        soft_cap,
        torch.get_num_threads(),
    )
    return output


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> None:
    num_kv_heads, block_size, head_dim, block_stride = _check_cache("store_kv", kv_cache)
    form, scales = _form("store_kv", kv_cache, key.dtype, kv_scales)
    num_tokens = key.shape[0]
    _check_slots("store_kv", slot_mapping, num_tokens)
    if key.shape[1:] != (num_kv_heads, head_dim) or value.shape != key.shape or value.dtype is not key.dtype:
        raise ValueError(
            f"store_kv: key {tuple(key.shape)} and value {tuple(value.shape)} must be "
            f"[num_tokens, {num_kv_heads}, {head_dim}] of one dtype"
        )
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    _store_kv(
        dtype_code(key),
        form,
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        scales,
        block_stride,
        block_size,
        num_kv_heads,
        head_dim,
        num_tokens,
        threads_for(2 * key.numel()),
    )


def _check_slots(op: str, slot_mapping: Tensor, num_tokens: int) -> None:
    if slot_mapping.dtype is not torch.int64 or slot_mapping.shape != (num_tokens,) or not slot_mapping.is_contiguous():
        raise TypeError(f"{op}: slot_mapping must be contiguous int64 [{num_tokens}]")


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
    num_tokens, all_heads, head_dim = qkv.shape
    token_stride, head_stride, element_stride = qkv.stride()
    num_kv_heads, block_size, cache_head_dim, block_stride = _check_cache("rotary_store_kv", kv_cache)
    form, scales = _form("rotary_store_kv", kv_cache, qkv.dtype, kv_scales)
    _check_slots("rotary_store_kv", slot_mapping, num_tokens)
    num_heads = all_heads - 2 * num_kv_heads
    if num_heads <= 0 or head_dim != cache_head_dim or element_stride != 1:
        raise ValueError(
            f"rotary_store_kv: qkv {tuple(qkv.shape)} must be [num_tokens, num_heads + {2 * num_kv_heads}, "
            f"{cache_head_dim}], its last dimension contiguous"
        )
    if positions.dtype is not torch.int64 or positions.shape != (num_tokens,) or not positions.is_contiguous():
        raise TypeError(f"rotary_store_kv: positions must be contiguous int64 [{num_tokens}]")
    rotary_dim = cos_sin_cache.shape[1]
    if cos_sin_cache.dtype is not torch.float32 or rotary_dim > head_dim or not cos_sin_cache.is_contiguous():
        raise ValueError(
            f"rotary_store_kv: cos_sin_cache must be contiguous float32 with at most {head_dim} columns, "
            f"not {cos_sin_cache.dtype} with {rotary_dim}"
        )
    if (q_weight is None) is not (k_weight is None):
        raise ValueError("rotary_store_kv: query and key are normalised both or neither")
    if q_weight is not None and k_weight is not None and q_weight.dtype is not k_weight.dtype:
        raise ValueError(f"rotary_store_kv: the weights are {q_weight.dtype} and {k_weight.dtype}, expected one dtype")
    weight_dtypes = (
        (qkv.dtype, torch.float32) if q_weight is None or qkv.dtype is not torch.float32 else (q_weight.dtype,)
    )
    _rotary_store_kv(
        dtype_code(qkv),
        form,
        dtype_code(qkv if q_weight is None else q_weight),
        positions.data_ptr(),
        qkv.data_ptr(),
        token_stride,
        head_stride,
        cos_sin_cache.data_ptr(),
        rotary_dim,
        None if q_weight is None else norm_weight(q_weight, head_dim, *weight_dtypes),
        None if k_weight is None else norm_weight(k_weight, head_dim, *weight_dtypes),
        eps,
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        scales,
        block_stride,
        block_size,
        num_heads,
        num_kv_heads,
        head_dim,
        num_tokens,
        threads_for(qkv.numel()),
    )
