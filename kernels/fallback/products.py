"""Products with packed weights, which are unpacked first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import reference
from pagewire.kernels.cpu.layouts import grouped_layout, packed_layout
from pagewire.kernels.reference import add_rms_norm, silu_and_mul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `ops.linear`, its sums rounded to x's dtype: to widen a weight would take longer than to multiply."""
    product = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return product if dtype is None else product.to(dtype)


def packed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Computes x [num_tokens, K] @ weight.T + bias [N], with `packed_layout`'s weight of N = out_features outputs."""
    return reference.linear(x, packed_layout.unpack(weight, out_features, x.shape[1]), bias, dtype)


def packed_gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Computes `packed_linear` in fp32, then `silu_and_mul`, in x's dtype."""
    return silu_and_mul(packed_linear(x, weight, bias, out_features, torch.float32), x.dtype)


def packed_embedding(token_ids: Tensor, weight: Tensor, num_rows: int, row_size: int) -> Tensor:
    """Returns rows [num_tokens, row_size] of a packed weight of num_rows outputs; token_ids int64 [num_tokens]."""
    return packed_layout.unpack(weight, num_rows, row_size)[token_ids]


def grouped_linear(
    x: Tensor,
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
    dtype: torch.dtype | None = None,
) -> Tensor:
    shape = (out_features, x.shape[1])
    weight = grouped_layout.dequantize(
        codes, scales, offsets, codebook, permutation, shape, bits, group_size, zero_point
    )
    return reference.linear(x, weight.to(x.dtype), bias, dtype)


def grouped_gated_linear(
    x: Tensor,
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
    exact: bool,
) -> Tensor:
    weight, form = (codes, scales, offsets, codebook, permutation), (out_features, bits, group_size, zero_point)
    return silu_and_mul(grouped_linear(x, *weight, bias, *form, torch.float32), x.dtype)


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
    normed = add_rms_norm(x, updated.copy_(residual), norm_weight, eps)
    weight = (codes, scales, offsets, codebook, permutation)
    product = grouped_linear(normed, *weight, bias, out_features, bits, group_size, zero_point)
    return silu_and_mul(product) if gated else product


def rough_grouped_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
) -> Tensor:
    form = (out_features, bits, group_size, zero_point)
    return grouped_linear(x, codes, scales, offsets, None, permutation, bias, *form)


def grouped_embedding(
    token_ids: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    num_rows: int,
    row_size: int,
    bits: int,
    group_size: int,
    zero_point: int,
    dtype: torch.dtype,
) -> Tensor:
    shape = (num_rows, row_size)
    weight = grouped_layout.dequantize(codes, scales, offsets, codebook, None, shape, bits, group_size, zero_point)
    return weight[token_ids].to(dtype)
