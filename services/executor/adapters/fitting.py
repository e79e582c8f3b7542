"""The layers of a model that take adapters, and an adapter in the form of these layers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pagewire.services.executor.adapters.host import HostAdapter, LayerWeights
from pagewire.services.executor.adapters.low_rank import AdapterError, AdapterFiles, LowRank
from pagewire.services.executor.adapters.names import named_modules
from pagewire.services.executor.config.model_config import DecoderConfig
from pagewire.services.executor.layers.experts.experts import ExpertsConfig, ExpertsLinear
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.parts import select
from pagewire.services.executor.layers.weights import Shard, WeightModule
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.parallel.stage import WHOLE

_LAYER = re.compile(r"\.(\d+)\.")  # the first number in the name of a module
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")
_NAMES_SHOWN = 8


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """A layer that takes adapters: one product, or one for each expert of the rank."""

    layer: Linear | ExpertsLinear

    @property
    def num_experts(self) -> int:
        """Returns how many products there are."""
        return self.layer.num_experts if isinstance(self.layer, ExpertsLinear) else 1

    @property
    def of_experts(self) -> bool:
        return isinstance(self.layer, ExpertsLinear)

    @property
    def num_parts(self) -> int:
        return len(self.layer.shards) // self.num_experts

    @property
    def num_inputs(self) -> int:
        return self.layer.weight.shape[1]

    @property
    def num_outputs(self) -> int:
        """Returns those of one product."""
        return self.layer.weight.shape[0] // self.num_experts

    @property
    def starts(self) -> list[int]:
        """Returns where each part of a product's outputs begins, and the end of the last."""
        return list(accumulate((shard.num_outputs for shard in self.layer.shards[: self.num_parts]), initial=0))

    def num_bytes(self, num_slots: int, max_rank: int, dtype: torch.dtype) -> int:
        """Returns the memory that slots take."""
        numbers = self.num_experts * (self.num_parts * self.num_inputs + self.num_outputs)
        return num_slots * max_rank * numbers * dtype.itemsize


@dataclass(frozen=True)
class _Place:
    layer: int  # index in `layers`
    shard: int  # index in its shards


class Fitting:
    """Fits adapters to a model's layers; on any thread."""

    def __init__(self, model: OwnModel, max_rank: int, device: torch.device) -> None:
        """device: of the slots to which adapters are copied."""
        self.layers = adapted_layers(model)
        self._model = model
        self._max_rank, self._device, self._dtype = max_rank, device, model.config.dtype
        self._places = {
            shard.name: _Place(layer, index)
            for layer, adapted in enumerate(self.layers)
            for index, shard in enumerate(adapted.layer.shards)
        }

    def fit(self, files: AdapterFiles) -> HostAdapter:
        """Returns the rank's share of an adapter in the form of the slots. Raises AdapterError if it does not fit."""
        by_layer: dict[int, dict[int, LowRank]] = {}
        modules = named_modules(files, self._model)
        for name, module in modules.items():
            if module.rank > self._max_rank:
                raise AdapterError(
                    f"{name} has rank {module.rank}, and --max-lora-rank is {self._max_rank}; start the executor with "
                    f"--max-lora-rank {module.rank}"
                )
            place = self._places.get(name)
            if place is None:
                self._check_elsewhere(name, files)
                continue
            self._check_shape(name, module, self.layers[place.layer].layer.shards[place.shard], files)
            by_layer.setdefault(place.layer, {})[place.shard] = module
        rank = max(module.rank for module in modules.values())
        fitted = {index: self._fit_layer(self.layers[index], parts) for index, parts in by_layer.items()}
        has_experts = any(_EXPERT.fullmatch(name) for name in modules)
        return HostAdapter(files.digest, rank, files.base_model, fitted, has_experts)

    def _fit_layer(self, adapted: AdaptedLayer, modules: dict[int, LowRank]) -> LayerWeights:
        """modules: by index of their shard."""
        rank = max(module.rank for module in modules.values())
        down = self._host(adapted.num_experts, adapted.num_parts, rank, adapted.num_inputs)
        up = self._host(adapted.num_experts, rank, adapted.num_outputs)
        ranks = self._host(adapted.num_experts, adapted.num_parts, dtype=torch.int32)
        starts = adapted.starts
        for index, module in modules.items():
            shard, (expert, part) = adapted.layer.shards[index], divmod(index, adapted.num_parts)
            down[expert, part, : module.rank] = select(module.down, (None, shard.inputs))
            scaled = select(module.up, (shard.rows, None)).t().float() * module.scale
            up[expert, : module.rank, starts[part] : starts[part + 1]] = scaled
            ranks[expert, part] = module.rank
        if not (down.isfinite().all() and up.isfinite().all()):
            names = ", ".join([adapted.layer.shards[index].name for index in modules][:_NAMES_SHOWN])
            kind = str(self._dtype).removeprefix("torch.")
            raise AdapterError(
                f"{names}: the adapter exceeds what {kind} can hold; serve the model with --dtype bfloat16"
            )
        return LayerWeights(down, up, ranks)

    def _host(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        pinned = self._device.type == "cuda"  # so that copies do not wait for the device
        return torch.zeros(shape, dtype=dtype or self._dtype, device="cpu", pin_memory=pinned)

    def _check_elsewhere(self, name: str, files: AdapterFiles) -> None:
        """Raises AdapterError for a module that is none of this rank, unless it may be one of another."""
        stage, config = getattr(self._model, "stage", WHOLE), self._model.config
        found = _LAYER.search(name)
        if stage is not WHOLE and found is not None and isinstance(config, DecoderConfig):
            index, num_layers = int(found[1]), config.num_layers
            if index < num_layers and index not in stage.layers(num_layers):
                return
        if self._is_another_expert(name):
            return
        is_there = any(
            shard.name == name or name.startswith(f"{shard.name}.")
            for leaf in self._model.leaves()
            if isinstance(leaf, WeightModule)
            for shard in leaf.shards
        )
        served = ", ".join(sorted({known.rpartition(".")[2] for known in self._places})[:_NAMES_SHOWN])
        if is_there:
            raise AdapterError(
                f"{name} is a part of {config.architecture} that takes no adapters; train without it ({served} take "
                "them), or merge the adapter into the weights of the model"
            )
        raise AdapterError(
            f"{config.architecture} as it is served here has no layer {name} that takes adapters ({served} do); the "
            f"adapter was made for {files.base_model or 'another model'}"
        )

    def _is_another_expert(self, name: str) -> bool:
        """Returns whether it is of an expert of another rank, which has whole experts."""
        experts, match = getattr(self._model.config, "experts", None), _EXPERT.fullmatch(name)
        if not isinstance(experts, ExpertsConfig) or match is None or int(match[2]) >= experts.num_experts:
            return False
        return any(f"{match[1]}{expert}{match[3]}" in self._places for expert in range(experts.num_experts))

    def _check_shape(self, name: str, module: LowRank, shard: Shard, files: AdapterFiles) -> None:
        has, expected = (module.up.shape[0], module.down.shape[1]), (shard.out_features, shard.in_features)
        if has != expected:
            raise AdapterError(
                f"{name} has {expected[1]} inputs and {expected[0]} outputs, and the adapter was made for {has[1]} and "
                f"{has[0]}: its base model is {files.base_model or 'another one'}"
            )


def adapted_layers(model: OwnModel) -> list[AdaptedLayer]:
    """Returns the layers with products that take adapters, in the order of computation: not the output head, which
    sees sampled tokens only."""
    head = getattr(model, "lm_head", None)
    leaves = (leaf for leaf in model.leaves() if isinstance(leaf, Linear | ExpertsLinear))
    return [AdaptedLayer(leaf) for leaf in leaves if leaf is not head]
