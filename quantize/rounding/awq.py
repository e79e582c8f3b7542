"""AWQ: inputs with large activations get finer weights, by scaling them up before rounding.

Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration" (2024), section
3. The factor of a weight's input column divides the output of the layer before, so that the model stays the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagewire.quantize.rounding.activations import products_of
from pagewire.quantize.rounding.gptq import GptqOptions, gptq
from pagewire.quantize.rounding.grid import Grid, Rounded, min_max_scales, row_errors

_EXPONENTS = tuple(step / 10 for step in range(11))
_SMALLEST = 1e-4  # lower bound of a mean magnitude: an input that is always zero must not get a scale of zero


def input_scales(
    weight: Tensor, hessian: Tensor, magnitude: Tensor, grid: Grid, producers: Tensor | None = None
) -> Tensor:
    """Returns the factors of the weight's columns, float32 [K], that give the layer's output the least error.

    weight float32 [N, K]; hessian float32 [K, K], the sum of x xT over the layer's inputs x; magnitude float32 [K], the
    mean of |x|. The candidates are magnitude**a and magnitude**a / (mean |weight|)**(1 - a) for a from 0 to 1.
    producers: int64 [K], the output of the layer before that each input comes from, if several inputs share one; these
    get the same scale.
    """
    magnitude = _shared(magnitude, producers).clamp(min=_SMALLEST)
    weight_magnitude = _shared(_relative_magnitude(weight, grid), producers).clamp(min=_SMALLEST)
    best = torch.ones_like(magnitude)
    delta, buffer = torch.empty_like(weight), torch.empty_like(weight)

    def output_error(scales: Tensor) -> float:
        scaled = torch.mul(weight, scales, out=buffer)
        for columns in grid.groups(weight.shape[1]):
            part = scaled[:, columns]
            min_max_scales(part, grid).nearest(part, grid, delta[:, columns])
        with products_of(torch.bfloat16):  # precise enough for the choice
            return row_errors(delta.div_(scales).sub_(weight), hessian).sum().item()

    least = output_error(best)
    for exponent in _EXPONENTS:
        for weight_exponent in (0.0, 1 - exponent):
            scales = magnitude**exponent / weight_magnitude**weight_exponent
            scales /= (scales.max() * scales.min()).sqrt()
            error = output_error(scales)
            if error < least:
                best, least = scales, error
    return best


def awq(weight: Tensor, hessian: Tensor, grid: Grid, options: GptqOptions) -> Rounded:
    """Rounds a weight with scaled columns, float32 [N, K]; hessian [K, K] of the divided inputs.

    Unlike in the paper, columns compensate for each other's errors as in GPTQ: the scales determine which weights are
    precise, and compensation gains as much with them. Groups are of neighbouring inputs: the layout has no others.
    """
    return gptq(weight, hessian, grid, replace(options, static_groups=True))


def _relative_magnitude(weight: Tensor, grid: Grid) -> Tensor:
    """float32 [K]: mean over the outputs of |weight| relative to the largest of its group."""
    parts = [weight[:, columns].abs() for columns in grid.groups(weight.shape[1])]
    return torch.cat([(part / part.amax(dim=1, keepdim=True).clamp(min=1e-12)).mean(dim=0) for part in parts])


def _shared(values: Tensor, producers: Tensor | None) -> Tensor:
    """Returns the mean over the inputs that come from one output."""
    if producers is None:
        return values
    sums = torch.zeros_like(values).index_add_(0, producers, values)
    counts = torch.zeros_like(values).index_add_(0, producers, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[producers]
