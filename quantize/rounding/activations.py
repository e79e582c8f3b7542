"""Statistics of a layer's inputs over the calibration text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class InputStatistics:
    """Sums over all inputs x float [K] of a layer.

    hessian    float32 [K, K]: x xT; half the second derivative of the output's squared error by a row of weights
    magnitude  float32 [K]: the mean of |x|
    """

    def __init__(self, num_inputs: int, device: torch.device) -> None:
        self.hessian = torch.zeros(num_inputs, num_inputs, device=device)
        self._sum = torch.zeros(num_inputs, device=device)
        self._count = 0

    @property
    def magnitude(self) -> Tensor:
        return self._sum / max(1, self._count)

    def add(self, inputs: Tensor) -> None:
        """Adds inputs [..., K] to the statistics."""
        inputs = inputs.reshape(-1, inputs.shape[-1])
        values = inputs.float()
        with products_of(inputs.dtype):
            self.hessian.addmm_(values.T, values)
        self._sum += values.abs().sum(dim=0)
        self._count += len(inputs)


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """Uses bfloat16 multipliers for float32 products of bfloat16 numbers: they are faster and lose nothing."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if dtype is torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
