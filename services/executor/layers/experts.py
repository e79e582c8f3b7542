"""A mixture of experts: each token goes through the few experts that its router prefers, and their outputs are summed.

Experts that all tokens share are a `GatedMLP` of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.quantized.packed import TILES
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.parts import StoredPart, indices
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.shares import even_share
from pagewire.services.executor.layers.weight_format import WeightOnly, input_unit, output_unit
from pagewire.services.executor.layers.weights import (
    Dense,
    NotLoaded,
    PackedGrouped,
    PackedWeight,
    Shard,
    stored_parts,
)
from pagewire.services.executor.model_config import ModelLoadError
from pagewire.services.executor.parallel.communicator import ALONE, Communicator

_MAX_EXPERTS = 4096
_TILE = 16  # what sizes of an expert must be multiples of; with quantized weights on CUDA it is more

# Of gate and up projections side by side
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu_pytorch_tanh": ops.gelu_tanh_and_mul,
}


@dataclass(frozen=True)
class ClampedSwiglu:
    """GPT-OSS's activation: `ops.clamped_swiglu`."""

    alpha: float
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        return ops.clamped_swiglu(x, self.alpha, self.limit)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts a token goes to, and what they count: `ops.route_experts` of a linear layer's outputs."""

    top_k: int
    router: str = "gate"  # the checkpoint's name of that layer
    bias: bool = False  # of that layer
    in_fp32: bool = False  # that layer, whatever the model's dtype is
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalize: bool = False  # weights of a token's experts sum to 1
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # of neighbouring experts, of which `topk_groups` are eligible
    topk_groups: int = 1
    group_best: int = 1  # a group is as good as the sum of so many of its best: 1 (DeepSeek-V2) or 2 (V3)
    correction_bias: str | None = None  # the checkpoint's name of what is added to scores when experts are chosen


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of one layer. Names are those of the checkpoint, within the module that has them all."""

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
        if self.num_experts > _MAX_EXPERTS:  # each has names, for one
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


@runtime_checkable
class ExpertsWeight(Protocol):
    """A weight of all experts' outputs, expert by expert."""

    def multiply_experts(self, x: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor) -> Tensor:
        """As `ops.experts_linear`."""


class ExpertsLinear:
    """A projection of every expert: as `Linear`, with the same shards for each, expert by expert.

    Inputs are not quantized, even where the checkpoint has scales for them: a scale per expert would be another input
    per expert.
    """

    __slots__ = ("_adds_bias", "bias", "num_experts", "shards", "weight")

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
        """outputs, inputs: of each expert's projections, what the rank has; None: all."""
        rows = None if outputs is None else indices(outputs)
        self.shards = tuple(
            Shard(expert.name(name), size, in_features, found and WeightOnly(found), config.bias, rows, inputs)
            for expert in (placement.within(f"experts.{i}") for i in range(config.num_experts))
            for name, size in shards.items()
            for found in [expert.format(name)]
        )
        self.num_experts = config.num_experts
        sizes = sum(shard.num_outputs for shard in self.shards), self.shards[0].num_inputs
        self.weight: PackedWeight = (
            Dense(placement.empty(*sizes)) if all(shard.format is None for shard in self.shards) else NotLoaded(*sizes)
        )
        self.bias = placement.empty(sizes[0]) if config.bias else None
        # The ranks' products are summed, so that one of them adds it.
        self._adds_bias = inputs is None or placement.tensor.rank == 0

    def __call__(self, x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        """As `ops.experts_linear`: x [num_tokens or pairs, in_features] -> [pairs, outputs of an expert]"""
        weight = self.weight
        assert isinstance(weight, ExpertsWeight)
        return weight.multiply_experts(x, self.bias if self._adds_bias else None, order, starts)

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
        """Why experts with these weights cannot be multiplied together."""
        if any(isinstance(part, PackedGrouped) and part.permutation is not None for part in parts):
            return "experts whose inputs act-order permutes are not supported"
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


class CorrectionBias:
    """What is added to the scores of experts to choose among them, so that all are used about equally; in fp32."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, num_experts: int, placement: Placement) -> None:
        self.name = placement.name(name)
        self.tensor = torch.empty(num_experts, dtype=torch.float32, device=placement.device)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield self.name, self.tensor


class Router(Linear):
    """The linear layer that says which experts a token prefers."""

    __slots__ = ("dtype",)

    def __init__(self, config: ExpertsConfig, placement: Placement) -> None:
        routing = config.routing
        self.dtype = torch.float32 if routing.in_fp32 else placement.dtype
        placement = replace(placement, dtype=self.dtype)
        super().__init__(config.hidden_size, {routing.router: config.num_experts}, placement, bias=routing.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.to(self.dtype))

    def install(self, parts: Sequence[PackedWeight]) -> None:
        super().install([Dense(part.tensor.to(self.dtype)) if isinstance(part, Dense) else part for part in parts])


class RoutedMLP:
    """A feed-forward block: `sum of weight_e * down_e(act(gate_e(x)) * up_e(x))` over the experts e of each token x."""

    __slots__ = ("activation", "correction_bias", "down", "gate_up", "num_experts", "ranks", "router", "routing")

    def __init__(self, config: ExpertsConfig, placement: Placement) -> None:
        """placement: of the module whose parts router and experts are, e.g. model.layers.0.mlp"""
        size, routing, activation = config.intermediate_size, config.routing, config.activation
        self.router = Router(config, placement)
        share = _share(config, placement) if placement.tensor.size > 1 else None
        gate_up = dict.fromkeys(config.gate_up, size)
        self.gate_up = ExpertsLinear(config, config.hidden_size, gate_up, placement, outputs=share)
        self.down = ExpertsLinear(config, size, {config.down: config.hidden_size}, placement, inputs=share)
        self.ranks = placement.tensor  # that sum
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.num_experts = config.num_experts
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
        inner = self.activation(self.gate_up(hidden, order, starts))
        combined = ops.combine_experts(self.down(inner, order, starts), weights)
        return combined if self.ranks.size == 1 else self.ranks.all_reduce(combined)

    @property
    def summing_ranks(self) -> Communicator | None:
        """As of `sums.Summed`."""
        return None if self.ranks.size == 1 else self.ranks

    def leave_sum(self) -> None:
        self.ranks = ALONE

    def leaves(self) -> Iterator[Linear | ExpertsLinear | CorrectionBias]:
        yield from (self.router, self.gate_up, self.down)
        if self.correction_bias is not None:
            yield self.correction_bias


def _share(config: ExpertsConfig, placement: Placement) -> range:
    """Of each expert's inner size. Raises ModelLoadError if ranks cannot share it."""
    expert, size, hidden_size = placement.within("experts.0"), config.intermediate_size, config.hidden_size
    units = [output_unit(expert.format(name), size, hidden_size) for name in config.gate_up]
    units.append(input_unit(expert.format(config.down), hidden_size, size))
    what = f"the inner size of the experts of {placement.prefix.removesuffix('.')}"
    return even_share(what, size, placement.tensor, math.lcm(_TILE, *units))
