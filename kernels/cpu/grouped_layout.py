"""Grouped weights as the CPU's kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized.packed import PackedGrouped
from kernels.quantized.weights import GroupedWeight


def pack(weight: GroupedWeight) -> PackedGrouped:
    minimums = weight.flat_minimums()
    zeros = weight.flat_zeros()
    offsets = minimums
    if minimums is None and weight.offsets is not None:
        assert zeros is not None
        offsets = zeros.to(torch.uint8)
    return PackedGrouped(
        "cpu",
        weight.shape,
        8,
        weight.group_size,
        weight.zero_point,
        weight.codes,
        weight.flat_scales(),
        offsets,
        weight.codebook,
        weight.permutation,
    )


def unpack(packed: PackedGrouped) -> GroupedWeight:
    return GroupedWeight(
        packed.codes,
        packed.bits,
        packed.group_size,
        packed.scales,
        None,
        packed.offsets,
        None,
        packed.zero_point,
        packed.codebook,
        packed.permutation,
    )


def dequantize(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    permutation: Tensor | None,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    zero_point: int,
) -> Tensor:
    """float32 [N, K] of a packed weight's tensors"""
    packed = PackedGrouped("cpu", shape, bits, group_size, zero_point, codes, scales, offsets, codebook, permutation)
    return unpack(packed).dequantize()
