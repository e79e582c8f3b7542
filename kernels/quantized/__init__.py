"""Quantized weights: what they are (`weights`), and what they become on a device (`packed`)."""

from kernels.quantized.packed import PackedFp8, PackedGrouped, PackedInt8, PackedWeight, pack
from kernels.quantized.weights import BITS, Fp8Weight, GroupedWeight, Int8Weight, QuantizedWeight, stack, to_device

__all__ = [
    "BITS",
    "Fp8Weight",
    "GroupedWeight",
    "Int8Weight",
    "PackedFp8",
    "PackedGrouped",
    "PackedInt8",
    "PackedWeight",
    "QuantizedWeight",
    "pack",
    "stack",
    "to_device",
]
