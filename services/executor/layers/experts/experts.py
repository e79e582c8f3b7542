"""A mixture of experts: each token goes through the few experts that its router prefers, and their outputs are summed.

Experts that all tokens share are a `GatedMLP` of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.quantized.packed import TILES
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.experts.routing import CorrectionBias, Router, Routing
from pagewire.services.executor.layers.experts.whole_experts import WholeExperts, own_experts
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.parts import StoredPart, indices
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.shares import even_share
from pagewire.services.executor.layers.weight_format import WeightOnly, input_unit, output_unit
from pagewire.services.executor.layers.weights import (
    Dense,
    LayerAdapters,
    NotLoaded,
    PackedGrouped,
    PackedWeight,
    Shard,
    stored_parts,
)
from pagewire.services.executor.parallel.communicator import ALONE, Communicator

_MAX_EXPERTS = 4096
_TILE = 16  # an expert's sizes must be multiples of this; of more for quantized weights on CUDA


def _silu_and_mul(x: Tensor) -> Tensor:
    return ops.silu_and_mul(x, None)


def _gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return ops.gelu_tanh_and_mul(x, None)


# Activations of gate and up projections side by side
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": _silu_and_mul, "gelu_pytorch_tanh": _gelu_tanh_and_mul}


@dataclass(frozen=True)
class ClampedSwiglu:
    """GPT-OSS's activation: `ops.clamped_swiglu`."""

    alpha: float
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        return ops.clamped_swiglu(x, self.alpha, self.limit)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of one layer. Names are the checkpoint's, within the module that has all experts."""

    num_experts: int
    hidden_size: int
    intermediate_size: int  # of one expert
    routing: Routing
    activation: str | ClampedSwiglu = "silu"
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")  # in an expert
    down: str = "down_proj"
    bias: bool = False

    def __post_init__(self) -> None:
        routing = self.routing
        if self.num_experts > _MAX_EXPERTS:  # each has names, for example
            raise ModelLoadError(f"config: {self.num_experts} experts in a layer are not supported, {_MAX_EXPERTS} are")
        group_size, ungrouped = divmod(self.num_experts, routing.num_groups)
        if ungrouped or group_size < (routing.group_best if routing.num_groups > 1 else 1):
            raise ModelLoadError(
                f"config: {self.num_experts} experts cannot be {routing.num_groups} groups of equal size, of "
                f"{routing.group_best} at least"
            )
        if routing.topk_groups > routing.num_groups or routing.top_k > group_size * routing.topk_groups:
            raise ModelLoadError(
                f"config: {routing.top_k} experts per token, but {self.num_experts} experts in "
                f"{routing.topk_groups} of {routing.num_groups} groups"
            )
        if self.hidden_size % _TILE or self.intermediate_size % _TILE:
            raise ModelLoadError(
                f"config: experts of {self.intermediate_size} by {self.hidden_size} are not supported, both must be "
                f"multiples of {_TILE}; use --model-impl transformers"
            )
        if isinstance(self.activation, str) and self.activation not in _ACTIVATIONS:
            raise ModelLoadError(f"config key hidden_act: {self.activation!r} is not one of {', '.join(_ACTIVATIONS)}")


@dataclass(frozen=True)
class PairAdapters:
    """The adapters of pairs of a token and an expert."""

    slots: Tensor  # int32 [pairs], of the experts' memory, -1 = none
    order: Tensor | None  # int64 [pairs], by slot: kernels of a GPU compute neighbours together; None: as they come

    def add(self, memory: LayerAdapters, product: Tensor, x: Tensor) -> None:
        """Adds them to the product [pairs, outputs] of x [num_tokens or pairs, inputs], in place."""
        (num_rows, size), num_pairs = x.shape, len(product)
        each = num_pairs // max(1, num_rows)
        if self.order is None:
            rows = x[:, None].expand(-1, each, -1).reshape(num_pairs, size)
            memory.add_in(self.slots, product, rows)
            return
        sums = product.index_select(0, self.order)
        rows = x.index_select(0, self.order if each == 1 else self.order // each)
        memory.add_in(self.slots.index_select(0, self.order), sums, rows)
        product.index_copy_(0, self.order, sums)


@runtime_checkable
class ExpertsWeight(Protocol):
    """A weight of the outputs of all experts, expert by expert."""

    def multiply_experts(self, x: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool) -> Tensor:
        """Computes `ops.experts_linear`."""


class ExpertsLinear:
    """A projection of every expert: like `Linear`, with the same shards for each expert, expert by expert.

    A checkpoint's scales of inputs are not used: with a scale per expert, each expert would need its own input.
    """

    __slots__ = ("_adds_bias", "adapters", "bias", "num_experts", "shards", "weight")

    multiplies = True

    def __init__(
        self,
        config: ExpertsConfig,
        in_features: int,
        shards: Mapping[str, int],
        placement: Placement,
        *,
        outputs: range | None = None,
        inputs: range | None = None,
    ) -> None:
        """outputs, inputs: the rank's part of each expert's projections; None: all. The rank has its own experts if the
        placement says so, else all."""
        experts = range(config.num_experts)
        if placement.whole_experts:
            experts = own_experts(config.num_experts, placement.tensor)
        rows = None if outputs is None else indices(outputs)
        self.shards = tuple(
            Shard(expert.name(name), size, in_features, found and WeightOnly(found), config.bias, rows, inputs)
            for expert in (placement.within(f"experts.{i}") for i in experts)
            for name, size in shards.items()
            for found in [expert.format(name)]
        )
        self.num_experts = len(experts)
        sizes = sum(shard.num_outputs for shard in self.shards), self.shards[0].num_inputs
        self.weight: PackedWeight = (
            Dense(placement.empty(*sizes)) if all(shard.format is None for shard in self.shards) else NotLoaded(*sizes)
        )
        self.bias = placement.empty(sizes[0]) if config.bias else None
        self.adapters: LayerAdapters | None = None
        # The ranks' products are summed, so only one rank adds the bias.
        self._adds_bias = inputs is None or placement.tensor.rank == 0

    def __call__(
        self, x: Tensor, order: Tensor, starts: Tensor, adapters: PairAdapters | None = None, *, gated: bool = False
    ) -> Tensor:
        """Computes `ops.experts_linear`: x [num_tokens or pairs, in_features] -> [pairs, outputs (gated: half)]

        adapters: not with `gated`.
        """
        weight = self.weight
        assert isinstance(weight, ExpertsWeight)
        product = weight.multiply_experts(x, self.bias if self._adds_bias else None, order, starts, gated)
        if adapters is not None and self.adapters is not None:
            adapters.add(self.adapters, product, x)
        return product

    @property
    def parts(self) -> tuple[PackedWeight, ...]:
        return (self.weight,)

    def install(self, parts: Sequence[PackedWeight]) -> None:
        if (refusal := self._refusal(parts)) is not None:
            raise ModelLoadError(
                f"module {self.shards[0].name}: {refusal}; add --quantization none to dequantize weights"
            )
        self.weight = parts[0]

    def _refusal(self, parts: Sequence[PackedWeight]) -> str | None:
        """Returns why experts with these weights cannot be multiplied together."""
        if any(isinstance(part, PackedGrouped) and part.permutation is not None for part in parts):
            return "experts with inputs that act-order permutes are not supported"
        if len(parts) > 1:
            return f"experts that differ in their quantized form ({len(parts)} forms in this layer) are not supported"
        weight, outputs = parts[0], parts[0].shape[0] // self.num_experts
        if isinstance(weight, PackedGrouped) and outputs % TILES[weight.layout]:
            return (
                f"quantized experts of {outputs} outputs are not supported on this device, only multiples of "
                f"{TILES[weight.layout]}"
            )
        return None

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for shard in self.shards:
            stop = start + shard.num_outputs
            if isinstance(self.weight, Dense):
                yield f"{shard.name}.weight", self.weight.tensor[start:stop]
            if self.bias is not None:
                yield f"{shard.name}.bias", self.bias[start:stop]
            start = stop

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        return stored_parts(self.shards)


class RoutedMLP:
    """A feed-forward block: `sum of weight_e * down_e(act(gate_e(x)) * up_e(x))` over the experts e of each token x."""

    __slots__ = (
        "activation",
        "correction_bias",
        "down",
        "dtype",
        "gate_up",
        "num_experts",
        "ranks",
        "result_dtype",
        "router",
        "routing",
        "whole",
    )

    def __init__(self, config: ExpertsConfig, placement: Placement) -> None:
        """placement: the placement of the module that contains router and experts, e.g. model.layers.0.mlp"""
        size, routing, activation = config.intermediate_size, config.routing, config.activation
        self.router = Router(routing, config.num_experts, config.hidden_size, placement)
        ranks, whole = placement.tensor, placement.whole_experts
        share = _share(config, placement) if ranks.size > 1 and not whole else None
        self.whole = WholeExperts(config.num_experts, routing.top_k, ranks, placement.device) if whole else None
        gate_up = dict.fromkeys(config.gate_up, size)
        self.gate_up = ExpertsLinear(config, config.hidden_size, gate_up, placement, outputs=share)
        self.down = ExpertsLinear(config, size, {config.down: config.hidden_size}, placement, inputs=share)
        self.ranks = ranks  # that sum the outputs
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.num_experts = config.num_experts
        self.dtype, self.result_dtype = placement.dtype, placement.result_dtype
        self.correction_bias = (
            None
            if routing.correction_bias is None
            else CorrectionBias(routing.correction_bias, config.num_experts, placement)
        )
        self.routing = routing

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        routing = self.routing
        ids, weights = ops.route_experts(
            self.router(hidden),
            None if self.correction_bias is None else self.correction_bias.tensor,
            routing.top_k,
            routing.scoring,
            routing.normalize,
            routing.scale,
            routing.num_groups,
            routing.topk_groups,
            routing.group_best,
        )
        order, starts = ops.sort_by_expert(ids, self.num_experts)
        hidden = hidden.to(self.dtype)
        if self.whole is not None:
            starts = self.whole.own_starts(starts)
        adapters = self._adapters(ids)
        if self.activation is _silu_and_mul and adapters is None:
            inner = self.gate_up(hidden, order, starts, gated=True)
        else:
            inner = self.activation(self.gate_up(hidden, order, starts, adapters))
        pairs = self.down(inner, order, starts, adapters)
        if self.whole is not None:
            if self.whole.exchanges(len(ids)):
                return self.whole.exchanged(pairs, ids, weights).to(self.result_dtype)
            weights = self.whole.own_weights(ids, weights)
        combined = ops.combine_experts(pairs, weights).to(self.result_dtype)
        return combined if self.ranks.size == 1 else self.ranks.all_reduce(combined)

    def _adapters(self, ids: Tensor) -> PairAdapters | None:
        """Returns the adapters of pairs with the rank's experts; None: no token has one."""
        memory = self.gate_up.adapters
        if memory is None or (slots := memory.slots.current) is None:
            return None
        count = self.gate_up.num_experts
        own = ids if self.whole is None else ids - self.whole.first
        has = slots[:, None] >= 0
        if self.whole is not None:
            has = has & (own >= 0) & (own < count)
        found = torch.where(has, slots[:, None] * count + own, -1).view(-1)
        return PairAdapters(found, found.argsort(stable=True) if _sorts_pairs(found) else None)

    @property
    def summing_ranks(self) -> Communicator | None:
        """Implements `sums.Summed`."""
        sums = self.ranks.size > 1 and (self.whole is None or self.whole.least_exchanged is None)
        return self.ranks if sums else None

    def leave_sum(self) -> None:
        self.ranks = ALONE

    def leaves(self) -> Iterator[Linear | ExpertsLinear | CorrectionBias]:
        yield from (self.router, self.gate_up, self.down)
        if self.correction_bias is not None:
            yield self.correction_bias


def _sorts_pairs(slots: Tensor) -> bool:
    """Returns whether the device computes neighbours of one slot together."""
    return slots.is_cuda


def _share(config: ExpertsConfig, placement: Placement) -> range:
    """Returns the share of each expert's inner size. Raises ModelLoadError if ranks cannot share it."""
    expert, size, hidden_size = placement.within("experts.0"), config.intermediate_size, config.hidden_size
    units = [output_unit(expert.format(name), size, hidden_size) for name in config.gate_up]
    units.append(input_unit(expert.format(config.down), hidden_size, size))
    what = f"the inner size of the experts of {placement.prefix.removesuffix('.')}"
    try:
        return even_share(what, size, placement.tensor, math.lcm(_TILE, *units))
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}; up to {config.num_experts} with --enable-expert-parallel") from None
