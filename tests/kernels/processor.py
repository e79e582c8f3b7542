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

_BLOCK = 64  # inputs that share a scale in fixed point
_LARGEST_INPUT, _LARGEST_WEIGHT = 8191, 4095


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


def fixed_point_error(x: Tensor, weight: Tensor, largest: Tensor, *, steps: float = 0.5) -> Tensor:
    """The most that rounding can change of x [tokens, in] times weight [out, in], in csrc/products/fixed_point.h.

    largest: [out, in], what a block's scale is chosen for; steps: of this scale, the most that a weight changes by.
    """
    error = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for inputs, weights, peaks in zip(
        x.abs().split(_BLOCK, 1), weight.abs().split(_BLOCK, 1), largest.abs().split(_BLOCK, 1), strict=True
    ):
        input_step = inputs.amax(1, keepdim=True) / _LARGEST_INPUT
        weight_step = peaks.amax(1, keepdim=True) / _LARGEST_WEIGHT
        error += 0.501 * input_step @ weights.sum(1, keepdim=True).T  # half a step, and rounding of scales
        error += (steps + 0.01) * (inputs.sum(1, keepdim=True) @ weight_step.T)
    return error


def norm_bounded_error(x: Tensor, weight: Tensor) -> Tensor:
    """The most that rounding can change of x [tokens, in] times weight [out, in], packed in fixed point; less where
    large inputs are multiplied apart, and where the norm of x can be computed in fp32."""
    units = -(-x.shape[1] // 32)
    block = -(-units // -(-units // 32)) * 32
    error = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for inputs, weights in zip(x.split(block, 1), weight.split(block, 1), strict=True):
        peaks = inputs.abs().amax(1)
        norms = torch.where((peaks > 1e-15) & (peaks < 1e17), inputs.norm(dim=1), peaks * block**0.5)
        input_step = torch.maximum(peaks / 32767, norms / 46300)[:, None]
        weight_step = 2 * torch.maximum(weights.abs().amax(1) / 32767, weights.norm(dim=1) / 46300)  # a power of two
        error += 0.501 * input_step * (weights.abs().sum(1) + 0.5 * inputs.shape[1] * weight_step)
        error += 0.501 * inputs.abs().sum(1, keepdim=True) * weight_step
    return error
