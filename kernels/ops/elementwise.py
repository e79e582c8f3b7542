"""Normalisation and activations."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op


@op(mutates=("residual",))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to residual in place; returns residual / sqrt(mean(residual²) + eps) * weight over the last dimension.

    x and residual [..., size]; weight [size] of x's dtype, or fp32, with which the product is rounded only once. The
    residual is of x's dtype, or fp32, from which the result is computed without rounding it to x's.
    """
    return x.new_empty(x.shape)


@op(mutates=("residual",))
def norm_add_rms_norm(x: Tensor, residual: Tensor, x_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises x, then computes `add_rms_norm` of it: residual += x / sqrt(mean(x²) + eps) * x_weight.

    x_weight [size], of weight's dtype.
    """
    return x.new_empty(x.shape)


@op(mutates=("x",))
def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Computes x / sqrt(mean(x²) + eps) * weight over the last dimension, in place.

    x [num_tokens, size], with any stride between rows; weight [size].
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
def silu_and_mul(x: Tensor) -> Tensor:
    """Computes x [num_tokens, 2 * size] -> silu(x[:, :size]) * x[:, size:]."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@op()
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Computes x [num_tokens, 2 * size] -> gelu(x[:, :size], tanh approximation) * x[:, size:]."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@op()
def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Computes x [num_tokens, 2 * size] -> gate * sigmoid(alpha * gate) * (up + 1), the activation of GPT-OSS.

    gate is x[:, :size], at most limit; up is x[:, size:] within +-limit.
    """
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@op()
def gelu(x: Tensor) -> Tensor:
    """Computes x [num_tokens, size] -> x * Phi(x), Phi the normal distribution's cumulative function."""
    return x.new_empty(x.shape)


@op()
def gelu_tanh(x: Tensor) -> Tensor:
    """Computes x [num_tokens, size] -> gelu(x), tanh approximation."""
    return x.new_empty(x.shape)
