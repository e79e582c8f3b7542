"""Quantized weights as dense ones, in memory that does not grow with the weight."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.quantized import FP8_BLOCK, QuantizedWeight, rows

_CHUNK_WEIGHTS = 1 << 20  # dequantized at a time, in float32


def dequantize_into(target: Tensor, weight: QuantizedWeight) -> None:
    """Dequantizes into target [N, K], of any float dtype, on the weight's device."""
    num_rows, num_inputs = weight.shape
    step = max(1, _CHUNK_WEIGHTS // (num_inputs * FP8_BLOCK)) * FP8_BLOCK
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        target[start:stop] = rows(weight, start, stop).dequantize()
