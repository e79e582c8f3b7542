"""Normalisation and gated activations (`pagewire.kernels.ops.elementwise`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x²) + eps) * weight over the last dimension.

    The normalised value is rounded to x's dtype before the weight multiplies it, as in transformers' LlamaRMSNorm.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns rms_norm(residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [num_tokens, 2 * size] -> silu(x[:, :size]) * x[:, size:]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """x [num_tokens, 2 * size] -> gelu(x[:, :size], tanh approximation) * x[:, size:]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)
