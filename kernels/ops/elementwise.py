"""Normalisation and activations."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.ops.definition import op


@op(mutates=("residual",))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None) -> Tensor:
    """Adds x to residual in place; returns residual / sqrt(mean(residual²) + eps) * weight over the last dimension.

    x and residual [..., size], weight [size]: each of dtype, which is the result's (None: x's), or fp32. With an fp32
    weight or residual the result is rounded only once.
    """
    return x.new_empty(x.shape, dtype=dtype)


@op(mutates=("residual",))
def norm_add_rms_norm(
    x: Tensor, residual: Tensor, x_weight: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None
) -> Tensor:
    """Normalises x, then computes `add_rms_norm` of it: residual += x / sqrt(mean(x²) + eps) * x_weight.

    x_weight [size], of weight's dtype.
    """
    return x.new_empty(x.shape, dtype=dtype)


@op(mutates=("x",))
def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Computes x / sqrt(mean(x²) + eps) * weight over the last dimension, in place.

    x [num_tokens, size], with any stride between rows; weight [size] of x's dtype, or of any where x is fp32.
    """


@op()
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension.

    x [num_tokens, size], weight and bias [size]; the variance is that of all, not of a sample.
    """
    return x.new_empty(x.shape)


@op(mutates=("residual",))
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Adds x to residual in place; returns layer_norm(residual). x and residual [num_tokens, size]."""
    return x.new_empty(x.shape)


@op()
def silu_and_mul(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Computes x [num_tokens, 2 * size] -> silu(x[:, :size]) * x[:, size:].

    dtype: the result's; None: x's. x has it, or is fp32.
    """
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=dtype)


@op()
def gelu_tanh_and_mul(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Computes x [num_tokens, 2 * size] -> gelu(x[:, :size], tanh approximation) * x[:, size:], in dtype as
    `silu_and_mul`."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=dtype)


@op()
def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Computes x [num_tokens, 2 * size] -> gate * sigmoid(alpha * gate) * (up + 1), the activation of GPT-OSS.

    gate is x[:, :size], at most limit; up is x[:, size:] within +-limit.
    """
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@op()
def gelu(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Computes x [num_tokens, size] -> x * Phi(x), Phi the normal distribution's cumulative function; dtype as in
    `silu_and_mul`."""
    return x.new_empty(x.shape, dtype=dtype)


@op()
def gelu_tanh(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Computes x [num_tokens, size] -> gelu(x), tanh approximation; dtype as in `silu_and_mul`."""
    return x.new_empty(x.shape, dtype=dtype)
