"""CPU ops in C++: argument checks, then one call through ctypes (which releases the GIL).

Importing this module compiles the library if need be and raises BuildError where that is impossible.
Shapes and meanings are those of `kernels.reference`.
"""

from __future__ import annotations

from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.build import load_library
from kernels.reference import apply_penalties, rotary_store_kv, sample_tokens, step_inputs, token_logprobs  # noqa: F401

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

MAX_HEAD_DIM = 256
# Elements below which an elementwise op runs on the calling thread alone.
_SERIAL_ELEMENTS = 32_768
# Tokens up to which reading row-major weights directly beats torch's blocked product, by dtype.
_MAX_DIRECT_TOKENS = {torch.bfloat16: 32, torch.float16: 16, torch.float32: 16}

_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float


def _bind(library: CDLL, name: str, *argument_types: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = argument_types
    function.restype = None
    return function


_library = load_library()
_attention = _bind(_library, "pagewire_paged_attention", _I, _I, *[_P] * 6, *[_L] * 4, *[_I] * 5, _F, _I, _F, _I)
_norm = _bind(_library, "pagewire_norm", _I, *[_P] * 4, *[_L] * 4, _I, _F, _I)
_rotary = _bind(_library, "pagewire_rotary", _I, *[_P] * 4, _L, _I, _I, *[_L] * 4, _I, _I)
_gated = _bind(_library, "pagewire_gated", _I, _I, _P, _P, _L, _L, _I, _I)
_store_kv = _bind(_library, "pagewire_store_kv", *[_P] * 4, _L, _I, *[_L] * 7)
_linear = _bind(_library, "pagewire_linear", _I, *[_P] * 4, *[_L] * 3, _I)


def _dtype(x: Tensor) -> int:
    code = _DTYPES.get(x.dtype)
    if code is None:
        raise TypeError(f"CPU kernels take float32, bfloat16 or float16, not {x.dtype}")
    return code


def _threads(elements: int) -> int:
    return 1 if elements < _SERIAL_ELEMENTS else torch.get_num_threads()


def _check_cache(op: str, kv_cache: Tensor) -> tuple[int, int, int, int]:
    """(num_kv_heads, block_size, head_dim, block stride); pages must be contiguous, the gap between them is free."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    strides = kv_cache.stride()
    head_stride = block_size * head_dim
    if strides[1:] != (num_kv_heads * head_stride, head_stride, head_dim, 1):
        raise ValueError(f"{op}: each page of kv_cache must be contiguous, its strides are {strides}")
    return num_kv_heads, block_size, head_dim, strides[0]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    _, num_heads, head_dim = query.shape
    token_stride, head_stride, element_stride = query.stride()
    num_kv_heads, block_size, cache_head_dim, block_stride = _check_cache("paged_attention", kv_cache)
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
    if not (block_table.stride(1) == query_start_loc.stride(0) == seq_lens.stride(0) == 1):
        raise ValueError("paged_attention: block_table rows, query_start_loc and seq_lens must be contiguous")
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attention(
        _dtype(query),
        _dtype(kv_cache),
        query.data_ptr(),
        kv_cache.data_ptr(),
        output.data_ptr(),
        block_table.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        token_stride,
        head_stride,
        block_stride,
        block_table.stride(0),
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


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    num_kv_heads, block_size, head_dim, block_stride = _check_cache("store_kv", kv_cache)
    if slot_mapping.dtype is not torch.int64 or slot_mapping.stride(0) != 1:
        raise TypeError("store_kv: slot_mapping must be contiguous int64")
    if key.shape[1:] != (num_kv_heads, head_dim) or value.shape != key.shape:
        raise ValueError(
            f"store_kv: key {tuple(key.shape)} and value {tuple(value.shape)} must be "
            f"[num_tokens, {num_kv_heads}, {head_dim}]"
        )
    if key.dtype is not kv_cache.dtype or value.dtype is not kv_cache.dtype:
        key, value = key.to(kv_cache.dtype), value.to(kv_cache.dtype)
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    size = kv_cache.element_size()
    _store_kv(
        key.data_ptr(),
        value.data_ptr(),
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        slot_mapping.shape[0],
        num_kv_heads,
        block_size,
        head_dim * size,
        block_stride * size,
        key.stride(0) * size,
        key.stride(1) * size,
        value.stride(0) * size,
        value.stride(1) * size,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    if x.is_contiguous():
        return _norm_into(x, None, weight, eps, x.numel() // size, 1, size, size)
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        return rms_norm(x.contiguous(), weight, eps)
    if x.dim() == 2:
        return _norm_into(x, None, weight, eps, x.shape[0], 1, x.stride(0), size)
    return _norm_into(x, None, weight, eps, x.shape[0], x.shape[1], x.stride(0), x.stride(1))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not residual.is_contiguous() or residual.shape != x.shape or residual.dtype is not x.dtype:
        raise ValueError("add_rms_norm: residual must be contiguous, of x's shape and dtype")
    size = x.shape[-1]
    return _norm_into(x.contiguous(), residual, weight, eps, x.numel() // size, 1, size, size)


def _norm_into(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    outer: int,
    inner: int,
    outer_stride: int,
    inner_stride: int,
) -> Tensor:
    size = x.shape[-1]
    if weight.dtype is not x.dtype:
        weight = weight.to(x.dtype)
    if weight.shape != (size,) or weight.stride(0) != 1:
        raise ValueError(f"rms_norm: weight must be contiguous [{size}], not {tuple(weight.shape)}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(
        _dtype(x),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        outer,
        inner,
        outer_stride,
        inner_stride,
        size,
        eps,
        _threads(outer * inner * size),
    )
    return out


def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_dim: int) -> None:
    if query.stride(2) != 1 or key.stride(2) != 1:
        raise ValueError("rotary_embedding: the last dimension of query and key must be contiguous")
    if cos_sin_cache.dtype is not torch.float32 or positions.dtype is not torch.int64:
        raise TypeError("rotary_embedding: cos_sin_cache must be float32 and positions int64")
    if key.dtype is not query.dtype:
        raise TypeError(f"rotary_embedding: query is {query.dtype} but key is {key.dtype}")
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim > head_dim or query.shape[2] != head_dim or not cos_sin_cache.is_contiguous():
        raise ValueError(
            f"rotary_embedding: query heads must have {head_dim} elements, not {query.shape[2]}, and cos_sin_cache "
            f"must be contiguous with at most as many columns, not {rotary_dim}"
        )
    _rotary(
        _dtype(query),
        positions.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        cos_sin_cache.data_ptr(),
        positions.shape[0],
        query.shape[1],
        key.shape[1],
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        rotary_dim,
        _threads(query.numel()),
    )


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated_into(x, gelu=0)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gated_into(x, gelu=1)


def _gated_into(x: Tensor, gelu: int) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    rows = out.numel() // size
    _gated(_dtype(x), gelu, x.data_ptr(), out.data_ptr(), rows, 2 * size, size, _threads(out.numel()))
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_tokens, in_features = x.shape
    dtype = x.dtype
    if (
        num_tokens > _MAX_DIRECT_TOKENS.get(dtype, 0)
        or in_features % 32
        or weight.shape[1] != in_features
        or weight.dtype is not dtype
        or not weight.is_contiguous()
        or (bias is not None and bias.dtype is not dtype)
    ):
        return F.linear(x, weight, bias)
    x = x.contiguous()
    out_features = weight.shape[0]
    out = torch.empty((num_tokens, out_features), dtype=dtype)
    _linear(
        _DTYPES[dtype],
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        in_features,
        out_features,
        torch.get_num_threads(),
    )
    return out
