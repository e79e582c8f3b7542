"""Normalisation and gated activations."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op


@op(cuda="elementwise.norm", mutates=("residual",))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns residual / sqrt(mean(residual²) + eps) * weight over the last dimension.

    x and residual [..., size], weight [size].
    """
    return x.new_empty(x.shape)


@op(cuda="elementwise.activation")
def silu_and_mul(x: Tensor) -> Tensor:
    """x [num_tokens, 2 * size] -> silu(x[:, :size]) * x[:, size:]."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@op(cuda="elementwise.activation")
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """x [num_tokens, 2 * size] -> gelu(x[:, :size], tanh approximation) * x[:, size:]."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
