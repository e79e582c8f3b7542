"""The slots of the device: which layers take adapters, the memory for them, and what each slot holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pagewire.services.executor.adapters import metrics
from pagewire.services.executor.adapters.host import HostAdapter, HostAdapters, LayerWeights
from pagewire.services.executor.adapters.low_rank import AdapterError, AdapterFiles, LowRank
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.config.model_config import DecoderConfig
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.parts import select
from pagewire.services.executor.layers.weights import LayerAdapters, Shard, TokenSlots, WeightModule
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.parallel.stage import WHOLE
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.step.step import InvalidStep, SlotChange, Step

_LAYER = re.compile(r"\.(\d+)\.")  # the first number in the name of a module
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class _Place:
    layer: int  # index in `layers`
    part: int
    shard: Shard


class AdapterSlots(Adapters):
    """Memory for `num_slots` adapters of up to `max_rank`, beside each linear layer of a model. An adapter is fitted to
    the layers on a reading thread, and copied to its slot on the device thread."""

    def __init__(
        self, model: OwnModel, num_slots: int, max_rank: int, device: torch.device, host: HostAdapters
    ) -> None:
        """host: the adapters that steps can put into the slots."""
        self.num_slots, self.max_rank = num_slots, max_rank
        self.host = host
        self.layers = adaptable_layers(model)
        self._device, self._dtype = device, model.config.dtype
        self._model = model
        self._tokens = TokenSlots()
        self._filled: dict[int, HostAdapter] = {}  # by slot, from 1
        self._places = {
            shard.name: _Place(index, part, shard)
            for index, layer in enumerate(self.layers)
            for part, shard in enumerate(layer.shards)
        }
        self.nbytes = num_bytes(self.layers, num_slots, max_rank, self._dtype)
        for layer in self.layers:
            layer.adapters = self._memory(layer)
        metrics.ADAPTER_SLOT_BYTES.set(self.nbytes)

    @property
    def heads(self) -> tuple[int, int] | None:
        """Query heads and KV heads of the model."""
        config = self._model.config
        return (config.num_heads, config.num_kv_heads) if isinstance(config, DecoderConfig) else None

    def _memory(self, layer: Linear) -> LayerAdapters:
        num_parts, num_outputs, num_inputs = len(layer.shards), *layer.weight.shape
        starts = list(accumulate((shard.num_outputs for shard in layer.shards), initial=0))
        return LayerAdapters(
            down=self._empty(self.num_slots, num_parts, self.max_rank, num_inputs),
            up=self._empty(self.num_slots, self.max_rank, num_outputs),
            starts=torch.tensor(starts, dtype=torch.int32, device=self._device),
            ranks=torch.zeros(self.num_slots, num_parts, dtype=torch.int32, device=self._device),
            slots=self._tokens,
        )

    def _empty(self, *shape: int) -> Tensor:
        # Written, so that a CPU takes the memory before the size of the KV cache is decided.
        return torch.empty(shape, dtype=self._dtype, device=self._device).zero_()

    def update(self, step: Step, state: RequestState) -> None:
        for change in step.slot_changes:
            if not 1 <= change.slot <= self.num_slots:
                raise InvalidStep(f"there is no adapter slot {change.slot}: --max-loras is {self.num_slots}")
            if (state.adapter_slots == change.slot).any():
                raise InvalidStep(f"adapter slot {change.slot} is to hold another adapter while a request uses it")
            self._fill(change)
        for request in step.new_requests:
            if request.adapter_slot and request.adapter_slot not in self._filled:
                raise InvalidStep(f"new request {request.request_id}: adapter slot {request.adapter_slot} is empty")

    def use(self, slots: Tensor | None) -> None:
        self._tokens.current = slots

    def reset(self) -> None:
        self._filled.clear()

    def _fill(self, change: SlotChange) -> None:
        """Copies an adapter to its slot; on CUDA behind the steps before, for which the host does not wait."""
        self._filled.pop(change.slot, None)
        if change.adapter is None:
            return
        assert isinstance(change.adapter, HostAdapter)
        slot = change.slot - 1
        for index, layer in enumerate(self.layers):
            memory, weights = layer.adapters, change.adapter.layers.get(index)
            assert memory is not None
            if weights is None:
                memory.ranks[slot].zero_()
                continue
            rank = weights.down.shape[1]
            memory.down[slot, :, :rank].copy_(weights.down, non_blocking=True)
            memory.up[slot, :rank].copy_(weights.up, non_blocking=True)
            memory.ranks[slot].copy_(weights.ranks, non_blocking=True)
        self._filled[change.slot] = change.adapter
        metrics.ADAPTER_SLOT_LOADS.inc()

    def fit(self, files: AdapterFiles) -> HostAdapter:
        """Returns the rank's share of an adapter in the form of the slots. Raises AdapterError if it does not fit."""
        by_layer: dict[int, dict[int, tuple[Shard, LowRank]]] = {}
        for name, module in files.modules.items():
            if module.rank > self.max_rank:
                raise AdapterError(
                    f"{name} has rank {module.rank}, and --max-lora-rank is {self.max_rank}; start the executor with "
                    f"--max-lora-rank {module.rank}"
                )
            place = self._places.get(name)
            if place is None:
                self._check_elsewhere(name, files)
                continue
            self._check_shape(name, module, place.shard, files)
            by_layer.setdefault(place.layer, {})[place.part] = place.shard, module
        fitted = {index: self._fit_layer(self.layers[index], parts) for index, parts in by_layer.items()}
        return HostAdapter(files.digest, files.rank, files.base_model, fitted)

    def _fit_layer(self, layer: Linear, parts: dict[int, tuple[Shard, LowRank]]) -> LayerWeights:
        rank = max(module.rank for _, module in parts.values())
        num_outputs, num_inputs = layer.weight.shape
        down = self._host(len(layer.shards), rank, num_inputs)
        up = self._host(rank, num_outputs)
        ranks = self._host(len(layer.shards), dtype=torch.int32)
        start = 0
        for part, shard in enumerate(layer.shards):
            stop = start + shard.num_outputs
            if part in parts:
                module = parts[part][1]
                down[part, : module.rank] = select(module.down, (None, shard.inputs))
                scaled = select(module.up, (shard.rows, None)).t().float() * module.scale
                up[: module.rank, start:stop] = scaled
                ranks[part] = module.rank
            start = stop
        if not (down.isfinite().all() and up.isfinite().all()):
            names = ", ".join(shard.name for shard, _ in parts.values())
            kind = str(self._dtype).removeprefix("torch.")
            raise AdapterError(
                f"{names}: the adapter exceeds what {kind} can hold; serve the model with --dtype bfloat16"
            )
        return LayerWeights(down, up, ranks)

    def _host(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        pinned = self._device.type == "cuda"  # so that copies do not wait for the device
        return torch.zeros(shape, dtype=dtype or self._dtype, device="cpu", pin_memory=pinned)

    def _check_elsewhere(self, name: str, files: AdapterFiles) -> None:
        """Raises AdapterError for a module that is none of this stage, unless it may be one of another."""
        stage, config = getattr(self._model, "stage", WHOLE), self._model.config
        found = _LAYER.search(name)
        if stage is not WHOLE and found is not None and isinstance(config, DecoderConfig):
            index, num_layers = int(found[1]), config.num_layers
            if index < num_layers and index not in stage.layers(num_layers):
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

    def _check_shape(self, name: str, module: LowRank, shard: Shard, files: AdapterFiles) -> None:
        has, expected = (module.up.shape[0], module.down.shape[1]), (shard.out_features, shard.in_features)
        if has != expected:
            raise AdapterError(
                f"{name} has {expected[1]} inputs and {expected[0]} outputs, and the adapter was made for {has[1]} and "
                f"{has[0]}: its base model is {files.base_model or 'another one'}"
            )


def adaptable_layers(model: OwnModel) -> list[Linear]:
    """Returns the layers with products that take adapters, in the order of computation: not the output head, which
    sees sampled tokens only."""
    head = getattr(model, "lm_head", None)
    return [leaf for leaf in model.leaves() if isinstance(leaf, Linear) and leaf is not head]


def num_bytes(layers: list[Linear], num_slots: int, max_rank: int, dtype: torch.dtype) -> int:
    """Returns the memory that slots take."""
    numbers = sum(len(layer.shards) * layer.weight.shape[1] + layer.weight.shape[0] for layer in layers)
    return num_slots * max_rank * numbers * dtype.itemsize


__all__ = ["AdapterSlots", "adaptable_layers", "num_bytes"]
