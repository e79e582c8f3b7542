"""Products with packed weights of experts, which are unpacked first."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.cpu.layouts import grouped_layout, packed_layout
from pagewire.kernels.reference import experts_linear


def packed_experts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, out_features: int, gated: bool
) -> Tensor:
    return experts_linear(x, packed_layout.unpack(weight, out_features, x.shape[1]), bias, order, starts, gated)


def grouped_experts_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    gated: bool,
) -> Tensor:
    shape = (out_features, x.shape[1])
    weight = grouped_layout.dequantize(codes, scales, offsets, codebook, None, shape, bits, group_size, zero_point)
    return experts_linear(x, weight, bias, order, starts, gated)
