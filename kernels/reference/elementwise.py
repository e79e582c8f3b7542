"""Normalisation and activations (`pagewire.kernels.ops.elementwise`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes x * rsqrt(mean(x²) + eps) * weight over the last dimension, in x's dtype.

    Where x and the weight have one dtype, the normalised value is rounded to it before the weight multiplies it, as in
    transformers' LlamaRMSNorm; else not at all, as in its GemmaRMSNorm.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if x.dtype is weight.dtype:
        normed = normed.to(weight.dtype)
    return (normed * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Adds x to residual in place; returns rms_norm(residual), in dtype (None: x's)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps).to(x.dtype if dtype is None else dtype)


def norm_add_rms_norm(
    x: Tensor, residual: Tensor, x_weight: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Adds rms_norm(x, x_weight) to residual in place; returns rms_norm(residual), in dtype (None: x's)."""
    dtype = x.dtype if dtype is None else dtype
    return add_rms_norm(rms_norm(x, x_weight, eps), residual, weight, eps, dtype)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    x.copy_(rms_norm(x, weight, eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    bias32 = None if bias is None else bias.float()
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias32, eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Adds x to residual in place; returns layer_norm(residual)."""
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps)


def silu_and_mul(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes x [num_tokens, 2 * size] -> silu(x[:, :size]) * x[:, size:], in dtype (None: x's)."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype if dtype is None else dtype)


def gelu_tanh_and_mul(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes x [num_tokens, 2 * size] -> gelu(x[:, :size], tanh approximation) * x[:, size:], in dtype as
    `silu_and_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype if dtype is None else dtype)


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)


def gelu(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return F.gelu(x.float()).to(x.dtype if dtype is None else dtype)


def gelu_tanh(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return F.gelu(x.float(), approximate="tanh").to(x.dtype if dtype is None else dtype)
