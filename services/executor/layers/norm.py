"""Root-mean-square normalisation, fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.layers.placement import Placement


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32."""

    __slots__ = ("eps", "name", "weight")

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self.name = placement.name(name)
        self.weight = placement.empty(size)
        self.eps = eps

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual stream in place and returns the stream normalised."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight
