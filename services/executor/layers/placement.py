"""Where a layer's weights live and in what precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """Memory for a weight that the loader fills."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
