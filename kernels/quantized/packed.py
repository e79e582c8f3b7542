"""Quantized weights in the layout of a device's kernels. A packed weight is called like a linear layer.

Packing happens once, when a model is loaded; the packed tensors are what the weights cache keeps.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.quantized.weights import ByteWeight, Fp8Weight, GroupedWeight, Int8Weight, QuantizedWeight

# layout -> module with pack(GroupedWeight) -> PackedGrouped and unpack(PackedGrouped) -> GroupedWeight
LAYOUTS = {
    "cpu": "pagewire.kernels.cpu.layouts.grouped_layout",
    "cuda": "pagewire.kernels.triton.products.grouped_layout",
}
# layout -> outputs that it keeps together
TILES = {"cpu": 16, "cuda": 64}


class PackedWeight(Protocol):
    """A weight of N outputs and K inputs on a device."""

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (N, K)"""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """x [num_tokens, K], bias [N] -> x @ weight.T + bias [num_tokens, N], in dtype: None is x's, else fp32"""


@dataclass(frozen=True)
class PackedGrouped:
    """A GroupedWeight on a device. Only the module of the layout knows what the tensors hold."""

    layout: str  # a key of LAYOUTS
    shape: tuple[int, int]
    bits: int  # of a packed code: a layout may take more than the weight needs
    group_size: int
    zero_point: int
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    codebook: Tensor | None
    permutation: Tensor | None

    @property
    def nbytes(self) -> int:
        return _nbytes(self.codes, self.scales, self.offsets, self.codebook, self.permutation)

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return ops.grouped_linear(
            x,
            self.codes,
            self.scales,
            self.offsets,
            self.codebook,
            self.permutation,
            bias,
            self.shape[0],
            self.bits,
            self.group_size,
            self.zero_point,
            dtype,
        )

    def gated(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Returns `silu_and_mul` of the product, in x's dtype."""
        if self.layout == "cuda":
            return ops.silu_and_mul(self(x, bias, dtype), x.dtype)
        return ops.grouped_gated_linear(
            x,
            self.codes,
            self.scales,
            self.offsets,
            self.codebook,
            self.permutation,
            None if bias is None else bias.float(),
            self.shape[0],
            self.bits,
            self.group_size,
            self.zero_point,
            dtype is None and x.dtype is torch.float32,
        )

    @property
    def takes_norm(self) -> bool:
        """Returns whether `after_norm` may be called."""
        return self.layout == "cuda"

    def after_norm(
        self,
        x: Tensor,
        residual: Tensor,
        updated: Tensor,
        norm_weight: Tensor,
        eps: float,
        bias: Tensor | None,
        gated: bool,
    ) -> Tensor:
        """Computes `ops.normed_linear`."""
        return ops.normed_grouped_linear(
            x,
            residual,
            updated,
            norm_weight,
            eps,
            self.codes,
            self.scales,
            self.offsets,
            self.codebook,
            self.permutation,
            bias,
            self.shape[0],
            self.bits,
            self.group_size,
            self.zero_point,
            gated,
        )

    def multiply_experts(self, x: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool) -> Tensor:
        """Computes `ops.experts_linear`. The weight has no permutation, and the outputs of each expert fill whole
        TILES."""
        return ops.grouped_experts_linear(
            x,
            self.codes,
            self.scales,
            self.offsets,
            self.codebook,
            bias,
            order,
            starts,
            self.shape[0],
            self.bits,
            self.group_size,
            self.zero_point,
            gated,
        )

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns rows [num_tokens, K] of the weight, dequantized; token_ids int64 [num_tokens]."""
        return ops.grouped_embedding(
            token_ids,
            self.codes,
            self.scales,
            self.offsets,
            self.codebook,
            self.shape[0],
            self.shape[1],
            self.bits,
            self.group_size,
            self.zero_point,
            dtype,
        )


@dataclass(frozen=True)
class RoughGrouped(PackedGrouped):
    """A weight in the layout "cpu", without a codebook; its products may round their inputs to 8 bits."""

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        product = ops.rough_grouped_linear(
            x,
            self.codes,
            self.scales,
            self.offsets,
            self.permutation,
            bias,
            self.shape[0],
            self.bits,
            self.group_size,
            self.zero_point,
        )
        return product if dtype is None else product.to(dtype)

    def gated(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return ops.silu_and_mul(self(x, bias, dtype), x.dtype)


@dataclass(frozen=True)
class _PackedBytes(ByteWeight):
    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight, self.scales, self.input_scale)


@dataclass(frozen=True)
class PackedInt8(_PackedBytes):
    """An `Int8Weight` on a device."""

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        product = ops.int8_linear(x, self.weight, self.scales, self.input_scale, bias, False)
        return product if dtype is None else product.to(dtype)

    def gated(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """`silu_and_mul` of the product."""
        return ops.int8_linear(x, self.weight, self.scales, self.input_scale, bias, True)


@dataclass(frozen=True)
class PackedFp8(_PackedBytes):
    """An `Fp8Weight` on a device."""

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        product = ops.fp8_linear(x, self.weight, self.scales, self.input_scale, bias, False)
        return product if dtype is None else product.to(dtype)

    def gated(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """`silu_and_mul` of the product."""
        return ops.fp8_linear(x, self.weight, self.scales, self.input_scale, bias, True)

    def multiply_experts(self, x: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool) -> Tensor:
        """Computes `ops.experts_linear`, without input_scale."""
        return ops.fp8_experts_linear(x, self.weight, self.scales, bias, order, starts, gated)


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Rearranges a weight for the kernels of the device that it is on."""
    device = weight.codes.device if isinstance(weight, GroupedWeight) else weight.weight.device
    layout = "cuda" if device.type == "cuda" or ops.cpu_backend() == "triton" else "cpu"
    if layout == "cpu" and not isinstance(weight, GroupedWeight):
        # Its kernels use activations with more precision than these formats.
        return pack_grouped(weight.as_grouped(), layout)
    if isinstance(weight, Int8Weight):
        return PackedInt8(weight.weight.contiguous(), weight.scales, weight.input_scale)
    if isinstance(weight, Fp8Weight):
        return PackedFp8(weight.weight.contiguous(), weight.scales, weight.input_scale)
    return pack_grouped(weight, layout)


def unpack(packed: PackedGrouped | PackedInt8 | PackedFp8) -> QuantizedWeight:
    """Returns a weight that dequantizes to the numbers of the one that was packed."""
    if isinstance(packed, PackedGrouped):
        return unpack_grouped(packed)
    form = Int8Weight if isinstance(packed, PackedInt8) else Fp8Weight
    return form(packed.weight, packed.scales, packed.input_scale)


def pack_grouped(weight: GroupedWeight, layout: str) -> PackedGrouped:
    """Packs a weight in a layout, a key of LAYOUTS."""
    packed: PackedGrouped = importlib.import_module(LAYOUTS[layout]).pack(weight)
    return packed


def unpack_grouped(packed: PackedGrouped) -> GroupedWeight:
    """Returns a weight of the numbers of the one that was packed; of fp8, a group with a NaN is NaN."""
    weight: GroupedWeight = importlib.import_module(LAYOUTS[packed.layout]).unpack(packed)
    return weight


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
