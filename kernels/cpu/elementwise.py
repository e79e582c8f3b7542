"""Normalisation and gated activations in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import F, I, L, P, bind, dtype_code, norm_weight, threads_for

__all__ = ["add_rms_norm", "gelu_tanh_and_mul", "silu_and_mul"]

_add_rms_norm = bind("add_rms_norm", I, *[P] * 4, L, I, F, I)
_gated = bind("gated", I, I, P, P, L, I, I)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not residual.is_contiguous() or residual.shape != x.shape or residual.dtype is not x.dtype:
        raise ValueError("add_rms_norm: residual must be contiguous, of x's shape and dtype")
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    _add_rms_norm(
        dtype_code(x),
        x.data_ptr(),
        residual.data_ptr(),
        norm_weight(weight, x.dtype, size),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
        threads_for(x.numel()),
    )
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated_into(x, gelu=0)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gated_into(x, gelu=1)


def _gated_into(x: Tensor, gelu: int) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    rows = out.numel() // size
    _gated(dtype_code(x), gelu, x.data_ptr(), out.data_ptr(), rows, size, threads_for(out.numel()))
    return out
