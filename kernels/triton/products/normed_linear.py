"""The ops normed_linear and normed_grouped_linear on CUDA: few rows in one kernel, more in a norm and a product with
its activation, many in a norm, a product and an activation."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.triton.elementwise.activation import silu_and_mul
from pagewire.kernels.triton.elementwise.norm import add_rms_norm_to
from pagewire.kernels.triton.products.grouped_linear import grouped_linear
from pagewire.kernels.triton.products.grouped_skinny import grouped_skinny_config, grouped_skinny_product
from pagewire.kernels.triton.products.linear import linear, skinny_config
from pagewire.kernels.triton.products.skinny import MAX_ROWS, skinny_product
from pagewire.kernels.triton.products.stream import Norm


def normed_linear(
    x: Tensor,
    residual: Tensor,
    updated: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
) -> Tensor:
    """Computes `reference.normed_linear`; x may have any stride between rows, residual and updated are contiguous."""
    config = skinny_config(x, weight)
    if config is not None and x.shape[0] <= MAX_ROWS:
        norm = Norm(residual, updated, norm_weight, eps)
        return skinny_product(x, weight, bias, config, norm=norm, gated=gated)
    normed = add_rms_norm_to(x, residual, updated, norm_weight, eps)
    if config is not None:
        return skinny_product(normed, weight, bias, config, norm=None, gated=gated)
    product = linear(normed, weight, bias)
    return silu_and_mul(product) if gated else product


def normed_grouped_linear(
    x: Tensor,
    residual: Tensor,
    updated: Tensor,
    norm_weight: Tensor,
    eps: float,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    gated: bool,
) -> Tensor:
    """Computes `ops.normed_grouped_linear` of a weight in the layout "cuda"; strides as in `normed_linear`."""
    form = (out_features, bits, group_size, zero_point)
    if codebook is None and permutation is None:
        config = grouped_skinny_config(x, *form[:-1])
        if config is not None:
            norm = Norm(residual, updated, norm_weight, eps)
            return grouped_skinny_product(x, codes, scales, offsets, bias, *form, config, norm=norm, gated=gated)
    normed = add_rms_norm_to(x, residual, updated, norm_weight, eps)
    return grouped_linear(normed, codes, scales, offsets, codebook, permutation, bias, *form, gated=gated)
