"""Normalisation, fused with the preceding residual addition if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.layers.parts import StoredPart
from pagewire.services.executor.layers.placement import Placement


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32."""

    __slots__ = ("dtype", "eps", "name", "weight")

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self.name = placement.name(name)
        self.weight = replace(placement, dtype=placement.result_dtype).empty(size)  # that of what it normalises
        self.eps = eps
        self.dtype = placement.input_dtype

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual stream in place and returns the stream normalised, as products take it."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, self.dtype)

    def add_before(self, following: RMSNorm, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x, normalised, to the residual stream in place and returns the stream normalised by `following`."""
        return ops.norm_add_rms_norm(x, residual, self.weight, following.weight, self.eps, self.dtype)

    def normalize(self, x: Tensor) -> None:
        """x [num_tokens, size], with any stride between rows, in place."""
        ops.rms_norm_(x, self.weight, self.eps)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight


class UnitOffsetRMSNorm(RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * (1 + weight)`, rounded only once, as in Gemma; checkpoints leave out the 1."""

    __slots__ = ()

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        super().__init__(name, size, eps, replace(placement, dtype=torch.float32, results=None, inputs=None))
        self.dtype = placement.input_dtype

    def finish_loading(self) -> None:
        self.weight += 1


class SplitRMSNorm(RMSNorm):
    """A norm over `size` elements, of which the rank has `own`."""

    __slots__ = ("own", "size")

    def __init__(self, name: str, size: int, own: range, eps: float, placement: Placement) -> None:
        super().__init__(name, len(own), eps, placement)
        self.own = own
        self.size = size

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        if len(self.own) < self.size:
            yield f"{self.name}.weight", StoredPart((self.size,), (self.own,))


class SplitRMSNorms:
    """Norms of several vectors of each token, of which every rank has an equal part."""

    __slots__ = ("norms", "ranks")

    def __init__(self, sizes: Mapping[str, tuple[int, range]], eps: float, placement: Placement) -> None:
        """sizes: name -> (all elements, the rank's elements, which several ranks may share)"""
        self.norms = [SplitRMSNorm(name, size, own, eps, placement) for name, (size, own) in sizes.items()]
        self.ranks = placement.tensor

    def normalize(self, vectors: Sequence[Tensor]) -> None:
        """Each [num_tokens, elements of the rank], with any stride between rows, in place."""
        if self.ranks.size == 1:
            for norm, x in zip(self.norms, vectors, strict=True):
                norm.normalize(x)
            return
        means = torch.stack([x.float().square().mean(dim=1) for x in vectors], dim=1)
        means = self.ranks.all_reduce(means).div_(self.ranks.size)
        for i, (norm, x) in enumerate(zip(self.norms, vectors, strict=True)):
            x.copy_(x.float() * torch.rsqrt(means[:, i : i + 1] + norm.eps) * norm.weight)

    def leaves(self) -> Iterator[RMSNorm]:
        yield from self.norms


class LayerNorm:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last dimension, computed in fp32."""

    __slots__ = ("bias", "eps", "name", "weight")

    def __init__(self, name: str, size: int, eps: float, placement: Placement, *, bias: bool) -> None:
        placement = replace(placement, dtype=placement.result_dtype)  # that of what it normalises
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
