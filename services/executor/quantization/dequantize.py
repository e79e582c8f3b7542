"""Quantized weights as dense ones, in memory that does not grow with the weight."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from kernels.quantized import Fp8Weight, QuantizedWeight

_CHUNK_WEIGHTS = 1 << 20  # dequantized at a time, in float32
_BLOCK = 128  # rows that may share a scale in fp8
_SHARED = ("codebook", "permutation", "input_scale")  # by all rows


def dequantize_into(target: Tensor, weight: QuantizedWeight) -> None:
    """target [N, K], of any float dtype, on the weight's device."""
    num_rows, num_inputs = weight.shape
    step = max(1, _CHUNK_WEIGHTS // (num_inputs * _BLOCK)) * _BLOCK
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        target[start:stop] = rows(weight, start, stop).dequantize()


def rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Outputs [start, stop) of a weight; start must be a multiple of 128."""
    part: dict[str, Any] = {
        field.name: value[start:stop]
        for field in fields(weight)
        if isinstance(value := getattr(weight, field.name), Tensor) and field.name not in _SHARED
    }
    if isinstance(weight, Fp8Weight) and weight.scales.dim() == 2:
        part["scales"] = weight.scales[start // _BLOCK : -(-stop // _BLOCK)]
    return replace(weight, **part)
