"""Quantized weights: as numbers (`weights`), and packed for a device (`packed`)."""

from pagewire.kernels.quantized.packed import PackedFp8, PackedGrouped, PackedInt8, PackedWeight, pack, unpack
from pagewire.kernels.quantized.parts import columns, rows, take_rows
from pagewire.kernels.quantized.weights import (
    BITS,
    E4M3,
    FP8_BLOCK,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    stack,
    to_device,
    weight_only,
)

__all__ = [
    "BITS",
    "E4M3",
    "FP8_BLOCK",
    "Fp8Weight",
    "GroupedWeight",
    "Int8Weight",
    "PackedFp8",
    "PackedGrouped",
    "PackedInt8",
    "PackedWeight",
    "QuantizedWeight",
    "columns",
    "pack",
    "rows",
    "stack",
    "take_rows",
    "to_device",
    "unpack",
    "weight_only",
]
