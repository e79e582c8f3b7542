"""Normalisation and activations in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import F, I, L, P, bind, dtype_code, narrowed_dtype, norm_weight, threads_for

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "clamped_swiglu",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "layer_norm",
    "norm_add_rms_norm",
    "rms_norm_",
    "silu_and_mul",
]

_add_rms_norm = bind("add_rms_norm", I, I, I, I, *[P] * 5, L, I, F, I)
_rms_norm = bind("rms_norm", I, I, P, L, P, L, I, F, I)
_layer_norm = bind("layer_norm", I, *[P] * 5, L, I, F, I)
_gated = bind("gated", I, I, I, P, P, L, I, I)
_clamped_swiglu = bind("clamped_swiglu", I, P, P, F, F, L, I, I)
_activated = bind("activated", I, I, I, P, P, L, I)

_SILU, _GELU_TANH, _GELU = range(3)  # as in elementwise.cpp


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    return _add_into(x, residual, None, weight, eps, dtype)


def norm_add_rms_norm(
    x: Tensor, residual: Tensor, x_weight: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    if x_weight.dtype is not weight.dtype:
        raise ValueError(f"norm_add_rms_norm: the weights are {x_weight.dtype} and {weight.dtype}, expected one dtype")
    return _add_into(x, residual, x_weight, weight, eps, dtype)


def _add_into(
    x: Tensor, residual: Tensor, x_weight: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None
) -> Tensor:
    dtype = narrowed_dtype("add_rms_norm", x, dtype)
    has_dtype = residual.dtype in (dtype, torch.float32)
    if not residual.is_contiguous() or residual.shape != x.shape or not has_dtype:
        raise ValueError("add_rms_norm: residual must be contiguous, of x's shape, and of the result's dtype or fp32")
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype)
    _add_rms_norm(
        dtype_code(out),
        dtype_code(x),
        dtype_code(residual),
        dtype_code(weight),
        x.data_ptr(),
        residual.data_ptr(),
        None if x_weight is None else norm_weight(x_weight, size, dtype, torch.float32),
        norm_weight(weight, size, dtype, torch.float32),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
        threads_for(x.numel()),
    )
    return out


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    rows, size = x.shape
    if x.stride(1) != 1:
        raise ValueError("rms_norm_: the last dimension of x must be contiguous")
    is_wide = x.dtype is torch.float32
    _rms_norm(
        dtype_code(x),
        dtype_code(weight),
        x.data_ptr(),
        x.stride(0),
        norm_weight(weight, size, weight.dtype if is_wide else x.dtype),
        rows,
        size,
        eps,
        threads_for(x.numel()),
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _layer_normed(x, None, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if not residual.is_contiguous() or residual.shape != x.shape or residual.dtype is not x.dtype:
        raise ValueError("add_layer_norm: residual must be contiguous, of x's shape and dtype")
    return _layer_normed(x, residual, weight, bias, eps)


def _layer_normed(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    _layer_norm(
        dtype_code(x),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        norm_weight(weight, size, x.dtype),
        None if bias is None else norm_weight(bias, size, x.dtype),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
        threads_for(x.numel()),
    )
    return out


def silu_and_mul(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _gated_into(x, _SILU, narrowed_dtype("silu_and_mul", x, dtype))


def gelu_tanh_and_mul(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _gated_into(x, _GELU_TANH, narrowed_dtype("gelu_tanh_and_mul", x, dtype))


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    rows, threads = out.numel() // size, threads_for(out.numel())
    _clamped_swiglu(dtype_code(x), x.data_ptr(), out.data_ptr(), alpha, limit, rows, size, threads)
    return out


def gelu(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _activated_into(x, _GELU, narrowed_dtype("gelu", x, dtype))


def gelu_tanh(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _activated_into(x, _GELU_TANH, narrowed_dtype("gelu_tanh", x, dtype))


def _activated_into(x: Tensor, activation: int, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    _activated(
        dtype_code(out), dtype_code(x), activation, x.data_ptr(), out.data_ptr(), out.numel(), threads_for(out.numel())
    )
    return out


def _gated_into(x: Tensor, activation: int, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=dtype)
    rows = out.numel() // size
    _gated(
        dtype_code(out), dtype_code(x), activation, x.data_ptr(), out.data_ptr(), rows, size, threads_for(out.numel())
    )
    return out
