"""Codes that are trained: rounded in every prediction, while what is rounded moves by small steps.

Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation" (2013): the
straight-through estimator, by which the gradient passes through the rounding as if it were not there.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOMENTUM = 0.9
_LARGEST = 4.0  # of a step, in parts of the weight's root mean square one
_MARGIN = 0.49  # by how much the number that is rounded may lie beyond the codes


class TunedCodes:
    """levels int8 or int16 [N, G, inputs per group]: codes minus zeros, between `lowest` and `highest` [N, G, 1].

    What is rounded to a level is kept as its distance from it, in float16: near a half, bfloat16 is too coarse.
    """

    def __init__(self, levels: Tensor, lowest: Tensor, highest: Tensor) -> None:
        self.levels = levels
        self._lowest, self._highest = lowest - _MARGIN, highest + _MARGIN
        self._distance = torch.zeros(levels.shape, dtype=torch.float16, device=levels.device)
        self._momentum = torch.zeros(levels.shape, dtype=torch.bfloat16, device=levels.device)

    def step(self, gradient: Tensor, rate: float) -> None:
        """gradient: by the levels, float32; is overwritten. rate: how far the mean level moves, in levels."""
        momentum = gradient.mul_(1 - _MOMENTUM).add_(self._momentum, alpha=_MOMENTUM)
        self._momentum.copy_(momentum)
        momentum /= momentum.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        moved = self.levels + self._distance.float()
        moved.sub_(momentum.clamp_(-_LARGEST, _LARGEST), alpha=rate)
        torch.minimum(torch.maximum(moved, self._lowest, out=moved), self._highest, out=moved)
        rounded = moved.round()
        self.levels.copy_(rounded)
        self._distance.copy_(moved.sub_(rounded))
