"""Ops on quantized weights in plain torch: dequantize, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import reference
from pagewire.kernels.cpu import grouped_layout
from pagewire.kernels.reference import int8_linear

__all__ = ["fp8_linear", "grouped_embedding", "grouped_linear", "int8_linear"]


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
) -> Tensor:
    shape = (out_features, x.shape[1])
    weight = grouped_layout.dequantize(
        codes, scales, offsets, codebook, permutation, shape, bits, group_size, zero_point
    )
    return F.linear(x, weight.to(x.dtype), bias)


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


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """For the op's sake: weights that are packed for a CPU have a codebook (`pack`)."""
    return reference.fp8_linear(x, weight, scales, input_scale, bias)
