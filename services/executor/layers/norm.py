"""Normalisation, fused with the residual addition before it where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
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

    def add_before(self, following: RMSNorm, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x, normalised, to the residual stream in place and returns the stream normalised by `following`."""
        return ops.norm_add_rms_norm(x, residual, self.weight, following.weight, self.eps)

    def normalize(self, x: Tensor) -> None:
        """x [num_tokens, size], with any stride between rows, in place."""
        ops.rms_norm_(x, self.weight, self.eps)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight


class UnitOffsetRMSNorm(RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * (1 + weight)`, rounded only once, as in Gemma; checkpoints leave out the 1."""

    __slots__ = ()

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        super().__init__(name, size, eps, replace(placement, dtype=torch.float32))

    def finish_loading(self) -> None:
        self.weight += 1


class LayerNorm:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last dimension, computed in fp32."""

    __slots__ = ("bias", "eps", "name", "weight")

    def __init__(self, name: str, size: int, eps: float, placement: Placement, *, bias: bool) -> None:
        self.name = placement.name(name)
        self.weight = placement.empty(size)
        self.bias = placement.empty(size) if bias else None
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual stream in place and returns the stream normalised."""
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight
        if self.bias is not None:
            yield f"{self.name}.bias", self.bias
