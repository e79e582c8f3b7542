"""Quantized weights as numbers, independent of checkpoint formats and of kernels' layouts.

`dequantize()` is the specification: every format's decoder and every kernel is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = [
    "BITS",
    "E4M3",
    "FP8_BLOCK",
    "SHARED_FIELDS",
    "SUPER_SIZE",
    "ByteWeight",
    "Fp8Weight",
    "GroupedWeight",
    "Int8Weight",
    "QuantizedWeight",
    "Weight",
    "stack",
    "to_device",
    "weight_only",
]

BITS = (2, 3, 4, 5, 6, 8)
SUPER_SIZE = 256  # inputs that share one scale of scales (GGUF's K-quants)
FP8_BLOCK = 128  # outputs, and inputs, that share a scale where fp8 has one per block
E4M3 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()  # what a byte stands for


@dataclass(frozen=True)
class GroupedWeight:
    """Integer codes with a scale, and perhaps an offset, per group of inputs.

    codes         uint8 [N, K], below 2**bits; N outputs, K inputs
    bits          one of BITS: how many bits a code needs
    group_size    inputs per group, G = ceil(K / group_size) groups; the last may be smaller. A single group has K
    scales        float16 or float32 [N, G]; or int8 [N, G] that super_scales float16 [N, ceil(K / 256)] multiply
    offsets       None:    w = scale * (code - zero_point)
                  uint8 [N, G], no super_offsets:      w = scale * (code - offset), offset an integer zero point
                  float, dtype of scales [N, G]:       w = scale * code + offset
                  uint8 [N, G] with super_offsets float16 [N, ceil(K / 256)]:  w = scale * code + offset * super_offset
    zero_point    where offsets is None
    codebook      None, or float32 [2**bits]: codebook[code] stands for the code; then no offsets, zero_point 0. With 8
                  bits that is E4M3
    permutation   None, or int32 [K]: column j of codes multiplies input permutation[j] (GPTQ's act-order); groups
                  are of neighbouring columns
    """

    codes: Tensor
    bits: int
    group_size: int
    scales: Tensor
    super_scales: Tensor | None = None
    offsets: Tensor | None = None
    super_offsets: Tensor | None = None
    zero_point: int = 0
    codebook: Tensor | None = None
    permutation: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (N, K)"""
        return self.codes.shape[0], self.codes.shape[1]

    def flat_scales(self) -> Tensor:
        """Returns float32 [N, G]"""
        return _flat(self.scales, self.super_scales, self.group_size)

    def flat_minimums(self) -> Tensor | None:
        """Returns float32 [N, G], added to scale * code; None where `flat_zeros` has an answer."""
        if self.offsets is None or (self.offsets.dtype is torch.uint8 and self.super_offsets is None):
            return None
        return _flat(self.offsets, self.super_offsets, self.group_size)

    def flat_zeros(self) -> Tensor | None:
        """Returns float32 [N, G], integers; None where `flat_minimums` has an answer."""
        if self.offsets is None:
            return torch.full(self.scales.shape, float(self.zero_point), device=self.scales.device)
        if self.offsets.dtype is torch.uint8 and self.super_offsets is None:
            return self.offsets.float()
        return None

    def dequantize(self) -> Tensor:
        """Returns float32 [N, K], inputs in the model's order."""
        num_inputs = self.codes.shape[1]

        def spread(groups: Tensor) -> Tensor:
            return groups.repeat_interleave(self.group_size, dim=1)[:, :num_inputs]

        values = self.codes.float() if self.codebook is None else self.codebook[self.codes.int()]
        scales, minimums, zeros = spread(self.flat_scales()), self.flat_minimums(), self.flat_zeros()
        if minimums is not None:
            weight = scales * values + spread(minimums)
        else:
            assert zeros is not None
            weight = scales * (values - spread(zeros))
        if self.permutation is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.permutation.long(), weight)

    def stacks_with(self, other: QuantizedWeight) -> bool:
        """Returns whether both can be rows of one weight."""
        return (
            isinstance(other, GroupedWeight)
            and self._form() == other._form()
            and _equal(self.codebook, other.codebook)
            and _equal(self.permutation, other.permutation)
        )

    def _form(self) -> tuple[object, ...]:
        tensors = (self.scales, self.super_scales, self.offsets, self.super_offsets)
        dtypes = tuple(None if t is None else t.dtype for t in tensors)
        return (self.codes.shape[1], self.bits, self.group_size, self.zero_point, *dtypes)


@dataclass(frozen=True)
class ByteWeight:
    """A byte per weight, without groups: what `Int8Weight`, `Fp8Weight` and their packed forms have in common."""

    weight: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (N, K)"""
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True)
class Int8Weight(ByteWeight):
    """Symmetric int8 with a scale per output, for products with int8 activations (W8A8).

    weight        int8 [N, K]
    scales        float32 [N]
    input_scale   None: activations are quantized per token; or float32 [1], a scale fixed at calibration
    """

    def dequantize(self) -> Tensor:
        """Returns float32 [N, K]"""
        return self.weight.float() * self.scales[:, None]

    def as_grouped(self) -> GroupedWeight:
        """Returns the same numbers in a single group, without input_scale."""
        codes = (self.weight.to(torch.int16) + 128).to(torch.uint8)
        return GroupedWeight(codes, 8, self.shape[1], self.scales[:, None], zero_point=128)

    def stacks_with(self, other: QuantizedWeight) -> bool:
        """Returns whether both can be rows of one weight."""
        return (
            isinstance(other, Int8Weight)
            and self.shape[1] == other.shape[1]
            and _equal(self.input_scale, other.input_scale)
        )


@dataclass(frozen=True)
class Fp8Weight(ByteWeight):
    """A weight in float8 e4m3 with a scale per output or per block.

    weight        float8_e4m3fn [N, K]
    scales        float32 [N], or [ceil(N / 128), ceil(K / 128)] per block of 128 x 128
    input_scale   None: activations are quantized per token (per 128 inputs of a token where scales are per block); or
                  float32 [1], a scale fixed at calibration. Only where the device multiplies fp8; elsewhere activations
                  keep their dtype.
    """

    def dequantize(self) -> Tensor:
        """Returns float32 [N, K]"""
        if self.scales.dim() == 1:
            return self.weight.float() * self.scales[:, None]
        num_outputs, num_inputs = self.shape
        scales = self.scales.repeat_interleave(FP8_BLOCK, dim=0)[:num_outputs]
        return self.weight.float() * scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :num_inputs]

    def as_grouped(self) -> GroupedWeight:
        """Returns the same numbers with a codebook, without input_scale."""
        codes, (num_outputs, num_inputs) = self.weight.view(torch.uint8), self.shape
        if self.scales.dim() == 1:
            return GroupedWeight(codes, 8, num_inputs, self.scales[:, None], codebook=E4M3)
        scales = self.scales.repeat_interleave(FP8_BLOCK, dim=0)[:num_outputs]
        return GroupedWeight(codes, 8, FP8_BLOCK, scales, codebook=E4M3)

    def stacks_with(self, other: QuantizedWeight) -> bool:
        """Returns whether both can be rows of one weight: blocks must not straddle them."""
        return (
            isinstance(other, Fp8Weight)
            and self.shape[1] == other.shape[1]
            and self.scales.dim() == other.scales.dim()
            and (self.scales.dim() == 1 or self.shape[0] % FP8_BLOCK == 0)
            and _equal(self.input_scale, other.input_scale)
        )


QuantizedWeight: TypeAlias = GroupedWeight | Int8Weight | Fp8Weight
Weight = TypeVar("Weight", bound=QuantizedWeight)

SHARED_FIELDS = ("input_scale", "codebook", "permutation")


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Returns one weight with the outputs of all weights, in order; each must `stacks_with` the next."""
    first = weights[0]
    if len(weights) == 1:
        return first
    stacked: dict[str, Any] = {
        field.name: _cat([getattr(weight, field.name) for weight in weights])
        for field in fields(first)
        if isinstance(getattr(first, field.name), Tensor) and field.name not in SHARED_FIELDS
    }
    return replace(first, **stacked)


def weight_only(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns the same numbers for products with activations as they are. The result stacks with others of any size and
    with any scales of inputs.
    """
    if isinstance(weight, GroupedWeight):
        return weight
    ends_in_block = isinstance(weight, Fp8Weight) and weight.scales.dim() == 2 and weight.shape[0] % FP8_BLOCK != 0
    if isinstance(weight, Int8Weight) or ends_in_block:
        return weight.as_grouped()
    return replace(weight, input_scale=None)


def to_device(weight: Weight, device: torch.device) -> Weight:
    """Returns the same weight with its tensors on `device`."""
    moved: dict[str, Any] = {
        field.name: getattr(weight, field.name).to(device)
        for field in fields(weight)
        if isinstance(getattr(weight, field.name), Tensor)
    }
    return replace(weight, **moved)


def _flat(groups: Tensor, supers: Tensor | None, group_size: int) -> Tensor:
    if supers is None:
        return groups.float()
    per_super = SUPER_SIZE // group_size
    return groups.float() * supers.float().repeat_interleave(per_super, dim=1)[:, : groups.shape[1]]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].dtype.itemsize == 1:  # not every torch build can concatenate fp8
        dtype = tensors[0].dtype
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)
    return torch.cat(list(tensors))
