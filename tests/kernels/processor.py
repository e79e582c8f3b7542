"""The ways in which the C++ kernels multiply on this processor, and the rounding of those in fixed point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pagewire.kernels.cpu.products.packed_linear import set_batch_invariant, set_bf16_form

__all__ = ["BF16_FORMS", "CPU", "batch_invariance", "bf16_multiplied_as", "fixed_point_error", "norm_bounded_error"]

BF16_FORMS = (0, 1, 2, 3)  # Bf16Form of csrc/common/processor.h

CPU = cpuinfo.read_text() if (cpuinfo := Path("/proc/cpuinfo")).exists() else ""

# Integers of inputs, and of weights that are decoded, and norms of those that share a scale
_LARGEST_INPUT, _LARGEST_WEIGHT = 32767, 12000
_INPUT_NORM, _WEIGHT_NORM = 46300**2 / 80000, 80000


@contextmanager
def bf16_multiplied_as(form: int) -> Iterator[None]:
    """Multiplies bf16 within in one of BF16_FORMS."""
    set_bf16_form(form)
    try:
        yield
    finally:
        set_bf16_form(0)


@contextmanager
def batch_invariance() -> Iterator[None]:
    set_batch_invariant(True)
    try:
        yield
    finally:
        set_batch_invariant(False)


def fixed_point_error(x: Tensor, weight: Tensor, largest: Tensor, block: int, *, steps: float = 0.5) -> Tensor:
    """The most that rounding can change of x [tokens, in] times weight [out, in], in csrc/products/fixed_point.h.

    largest: [out, in], what a block's scale is chosen for; block: inputs that share a scale; steps: of this scale, the
    most that a weight changes by.
    """
    error = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for inputs, weights, peaks in zip(x.split(block, 1), weight.split(block, 1), largest.split(block, 1), strict=True):
        input_step = torch.maximum(inputs.abs().amax(1) / _LARGEST_INPUT, _norms(inputs, block) / _INPUT_NORM)
        weight_step = peaks.abs().amax(1) * max(1 / _LARGEST_WEIGHT, block**0.5 / _WEIGHT_NORM)
        # half a step, and rounding of scales
        error += 0.501 * input_step[:, None] * (weights.abs().sum(1) + steps * block * weight_step)
        error += (steps + 0.01) * inputs.abs().sum(1, keepdim=True) * weight_step
    return error


def _norms(inputs: Tensor, block: int) -> Tensor:
    """Returns the norms of tokens' inputs, or bounds of them where squares are no floats."""
    peaks = inputs.abs().amax(1)
    return torch.where((peaks > 1e-15) & (peaks < 1e17), inputs.norm(dim=1), peaks * block**0.5)


def norm_bounded_error(x: Tensor, weight: Tensor) -> Tensor:
    """The most that rounding can change of x [tokens, in] times weight [out, in], packed in fixed point; less where
    large inputs are multiplied apart, and where the norm of x can be computed in fp32."""
    units = -(-x.shape[1] // 32)
    block = -(-units // -(-units // 32)) * 32
    error = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for inputs, weights in zip(x.split(block, 1), weight.split(block, 1), strict=True):
        input_step = torch.maximum(inputs.abs().amax(1) / 32767, _norms(inputs, block) / 46300)[:, None]
        weight_step = 2 * torch.maximum(weights.abs().amax(1) / 32767, weights.norm(dim=1) / 46300)  # a power of two
        error += 0.501 * input_step * (weights.abs().sum(1) + 0.5 * inputs.shape[1] * weight_step)
        error += 0.501 * inputs.abs().sum(1, keepdim=True) * weight_step
    return error
