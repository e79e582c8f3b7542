"""Products of heads, each with its own weight."""

from __future__ import annotations

import torch
from torch import Tensor


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(torch.matmul(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))
