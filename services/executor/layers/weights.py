"""Weights of layers: dense (packed or not), quantized, or several that differ in form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.quantized import PackedGrouped, PackedWeight
from pagewire.services.executor.layers.parts import StoredPart, neighbours
from pagewire.services.executor.layers.weight_format import WeightFormat


@dataclass(frozen=True, slots=True)
class Dense:
    """`tensor` [out_features, in_features]"""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return ops.linear(x, self.tensor, bias, dtype)

    @property
    def takes_norm(self) -> bool:
        """Returns whether `after_norm` is one kernel, at least for few rows; a CPU caches the norm's result."""
        return self.tensor.is_cuda or ops.cpu_backend() == "triton"

    def after_norm(
        self,
        x: Tensor,
        residual: Tensor,
        updated: Tensor,
        norm_weight: Tensor,
        eps: float,
        bias: Tensor | None,
        gated: bool,
    ) -> Tensor:
        """Computes `ops.normed_linear`."""
        return ops.normed_linear(x, residual, updated, norm_weight, eps, self.tensor, bias, gated)

    def multiply_experts(self, x: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool) -> Tensor:
        return ops.experts_linear(x, self.tensor, bias, order, starts, gated)


@dataclass(frozen=True, slots=True)
class PackedDense:
    """A dense weight in one of the layouts of the CPU's kernels, `pagewire.kernels.cpu.layouts.packed_layout`."""

    shape: tuple[int, int]  # [out_features, in_features]
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return ops.packed_linear(x, self.tensor, bias, self.shape[0], dtype)

    def gated(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return ops.packed_gated_linear(x, self.tensor, None if bias is None else bias.float(), self.shape[0])

    def multiply_experts(self, x: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool) -> Tensor:
        return ops.packed_experts_linear(x, self.tensor, bias, order, starts, self.shape[0], gated)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [num_tokens] -> the rows [num_tokens, in_features] of the weight"""
        return ops.packed_embedding(token_ids, self.tensor, *self.shape)


class Stacked:
    """Weights of different forms with their outputs side by side."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[PackedWeight]) -> None:
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        outputs, start = [], 0
        for part in self.parts:
            stop = start + part.shape[0]
            outputs.append(part(x, None if bias is None else bias[start:stop], dtype))
            start = stop
        return torch.cat(outputs, dim=-1)


class NotLoaded:
    """A placeholder of a quantized weight until the loader installs it."""

    __slots__ = ("nbytes", "shape")

    def __init__(self, out_features: int, in_features: int) -> None:
        self.shape = (out_features, in_features)
        self.nbytes = 0

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        raise RuntimeError("a quantized weight was used before it was loaded")


@dataclass(slots=True)
class TokenSlots:
    """The slots of the tokens in the step that is computed, for all layers."""

    current: Tensor | None = None  # int32 [num_tokens], from 0, -1 = none; None: no token has an adapter


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The memory of a layer for adapters, by slot; of experts, by slot and expert. A part is the output of one
    shard."""

    down: Tensor  # [num_slots, num_parts, rank, num_inputs]
    up: Tensor  # [num_slots, rank, num_outputs]
    starts: Tensor  # int32 [num_parts + 1], the outputs of each part
    ranks: Tensor  # int32 [num_slots, num_parts], 0 = nothing is added
    slots: TokenSlots

    @property
    def are_used(self) -> bool:
        return self.slots.current is not None

    def add(self, product: Tensor, x: Tensor) -> None:
        """Adds them to the layer's product of x, in place, if any token has one."""
        if (slots := self.slots.current) is not None:
            self.add_in(slots, product, x)

    def add_in(self, slots: Tensor, product: Tensor, x: Tensor) -> None:
        """Adds those of these slots, int32, one for each row of the product."""
        ops.add_adapters(product, x, self.down, self.up, slots, self.starts, self.ranks)


@dataclass(frozen=True)
class Shard:
    """A weight in the checkpoint, and the layer's part of it."""

    name: str  # of the module, e.g. model.layers.0.self_attn.q_proj
    out_features: int  # in the checkpoint
    in_features: int
    format: WeightFormat | None  # None: <name>.weight, dense
    has_bias: bool = False  # <name>.bias is the layer's, not the format's
    # int64: model row -> row in the checkpoint, for the layer's rows; None: all, in the same order
    rows: Tensor | None = field(default=None, compare=False)
    inputs: range | None = field(default=None, compare=False)  # the layer's inputs; None: all

    @property
    def num_outputs(self) -> int:
        return self.out_features if self.rows is None else len(self.rows)

    @property
    def num_inputs(self) -> int:
        return self.in_features if self.inputs is None else len(self.inputs)

    @property
    def num_weights(self) -> int:
        return self.num_outputs * self.num_inputs

    @property
    def share(self) -> float:
        """Returns its share of the stored weight, 0 to 1."""
        return self.num_weights / (self.out_features * self.in_features)

    def stored_weight(self, *, transposed: bool = False) -> StoredPart | None:
        """Returns a dense weight's part of the stored tensor. None: all of it, as stored."""
        if self.rows is None and self.inputs is None:
            return None
        shape, index = (self.out_features, self.in_features), (self._rows, self.inputs)
        return StoredPart(shape[::-1], index[::-1]) if transposed else StoredPart(shape, index)

    def stored_bias(self) -> StoredPart | None:
        return None if self.rows is None else StoredPart((self.out_features,), (self._rows,))

    @property
    def _rows(self) -> range | Tensor | None:
        return None if self.rows is None else neighbours(self.rows)


def stored_parts(shards: Iterable[Shard], *, transposed: bool = False) -> Iterator[tuple[str, StoredPart]]:
    """Yields the parts, in `SplitLayer`'s form, of a layer that is made of shards."""
    for shard in shards:
        if (weight := shard.stored_weight(transposed=transposed)) is not None:
            yield f"{shard.name}.weight", weight
        if (bias := shard.stored_bias()) is not None:
            yield f"{shard.name}.bias", bias


@runtime_checkable
class NormedWeight(Protocol):
    """A weight with a product that begins with a norm, and may end with an activation."""

    @property
    def takes_norm(self) -> bool: ...

    def after_norm(
        self,
        x: Tensor,
        residual: Tensor,
        updated: Tensor,
        norm_weight: Tensor,
        eps: float,
        bias: Tensor | None,
        gated: bool,
    ) -> Tensor: ...


@runtime_checkable
class GatedWeight(Protocol):
    """A weight of gates and ups with a product that may end with their activation."""

    def gated(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """`silu_and_mul` of the product in `dtype`, in x's dtype."""


@runtime_checkable
class WeightModule(Protocol):
    """A layer with a weight. If any shard is quantized, the loader reads all shards and installs the result."""

    shards: tuple[Shard, ...]

    @property
    def multiplies(self) -> bool:
        """Returns whether it is multiplied with; otherwise its rows are only looked up."""

    @property
    def parts(self) -> tuple[PackedWeight, ...]:
        """Returns the installed weight."""

    def install(self, parts: Sequence[PackedWeight]) -> None:
        """Installs a weight. parts: all outputs of all shards, in order; neighbouring shards may be merged into one
        part."""


__all__ = [
    "Dense",
    "LayerAdapters",
    "NormedWeight",
    "NotLoaded",
    "PackedDense",
    "PackedGrouped",
    "PackedWeight",
    "Shard",
    "Stacked",
    "TokenSlots",
    "WeightModule",
    "stored_parts",
]
