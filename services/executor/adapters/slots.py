"""The slots of the device: the memory for adapters beside a model's layers, and what each slot holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.services.executor.adapters import metrics
from pagewire.services.executor.adapters.fitting import AdaptedLayer, Fitting
from pagewire.services.executor.adapters.host import HostAdapter, HostAdapters
from pagewire.services.executor.adapters.low_rank import AdapterError, AdapterFiles
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.config.model_config import DecoderConfig
from pagewire.services.executor.device.memory import mib
from pagewire.services.executor.layers.weights import LayerAdapters, TokenSlots
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.step.step import InvalidStep, SlotChange, Step

ALIGNMENT = 64  # weights; each tensor begins at a multiple


class AdapterSlots(Adapters):
    """Memory for `num_slots` adapters of up to `max_rank`, beside each linear layer of a model. An adapter is fitted to
    the layers on a reading thread, and copied to its slot on the device thread."""

    def __init__(
        self, model: OwnModel, num_slots: int, max_rank: int, device: torch.device, host: HostAdapters
    ) -> None:
        """host: the adapters that steps can put into the slots. They have no memory before `allocate`."""
        self.num_slots, self.max_rank = num_slots, max_rank
        self.host = host
        self._fitting = Fitting(model, max_rank, device)
        self._device, self._dtype, self._config = device, model.config.dtype, model.config
        self._tokens = TokenSlots()
        self._filled: dict[int, HostAdapter] = {}  # by slot, from 1
        self._with_experts: bool | None = None  # None: not allocated yet

    @property
    def heads(self) -> tuple[int, int] | None:
        """Query heads and KV heads of the model."""
        config = self._config
        return (config.num_heads, config.num_kv_heads) if isinstance(config, DecoderConfig) else None

    def num_bytes(self, *, of_experts: bool) -> int:
        """Returns the memory for adapters of experts alone, or of all other layers."""
        layers = (layer for layer in self._fitting.layers if layer.of_experts == of_experts)
        return sum(layer.num_bytes(self.num_slots, self.max_rank, self._dtype) for layer in layers)

    def allocate(self, *, with_experts: bool) -> None:
        """Takes the memory. with_experts: adapters may change experts."""
        self._with_experts = with_experts
        layers = [adapted for adapted in self._fitting.layers if with_experts or not adapted.of_experts]
        shapes = [shape for adapted in layers for shape in self._shapes(adapted)]
        weights = iter(_zeros_in_one(shapes, self._dtype, self._device))
        for adapted in layers:
            adapted.layer.adapters = self._memory(adapted, next(weights), next(weights))
        self.nbytes = self.num_bytes(of_experts=False) + with_experts * self.num_bytes(of_experts=True)
        metrics.ADAPTER_SLOT_BYTES.set(self.nbytes)

    def _shapes(self, adapted: AdaptedLayer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        num_products = self.num_slots * adapted.num_experts
        down = (num_products, adapted.num_parts, self.max_rank, adapted.num_inputs)
        return down, (num_products, self.max_rank, adapted.num_outputs)

    def _memory(self, adapted: AdaptedLayer, down: Tensor, up: Tensor) -> LayerAdapters:
        return LayerAdapters(
            down=down,
            up=up,
            starts=torch.tensor(adapted.starts, dtype=torch.int32, device=self._device),
            ranks=torch.zeros(down.shape[0], adapted.num_parts, dtype=torch.int32, device=self._device),
            slots=self._tokens,
        )

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

    def on_all(self, step: Step) -> Step:
        """The adapter changes nothing: all kernels run, of which none finds a rank."""
        if not self.num_slots:
            return step
        nothing = HostAdapter(digest="", rank=0, base_model="", layers={})
        requests = [replace(request, adapter_slot=1) for request in step.new_requests]
        return replace(step, slot_changes=[SlotChange(1, "", nothing)], new_requests=requests)

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
        for index, adapted in enumerate(self._fitting.layers):
            if (memory := adapted.layer.adapters) is None:
                continue
            weights, count = change.adapter.layers.get(index), adapted.num_experts
            own = slice((change.slot - 1) * count, change.slot * count)
            if weights is None:
                memory.ranks[own].zero_()
                continue
            rank = weights.down.shape[2]
            memory.down[own, :, :rank].copy_(weights.down, non_blocking=True)
            memory.up[own, :rank].copy_(weights.up, non_blocking=True)
            memory.ranks[own].copy_(weights.ranks, non_blocking=True)
        self._filled[change.slot] = change.adapter
        metrics.ADAPTER_SLOT_LOADS.inc()

    def leave(self) -> None:
        """Gives the memory of the slots back, and drops the model; nothing else may follow. `host` stays of use."""
        for adapted in self._fitting.layers:
            adapted.layer.adapters = None
        self._filled.clear()
        del self._fitting

    def fit(self, files: AdapterFiles) -> HostAdapter:
        """Returns the rank's share of an adapter in the form of the slots. Raises AdapterError if it does not fit."""
        adapter = self._fitting.fit(files)
        if adapter.has_experts and self._with_experts is False:
            raise AdapterError(
                "it changes experts, for which no memory was reserved; start the executor with --lora-experts "
                f"({mib(self.num_bytes(of_experts=True))}), or name an adapter of experts in --lora-modules"
            )
        return adapter


def _zeros_in_one(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns tensors in one piece of memory: on a CPU, large pieces are in huge pages, which are read faster.

    They are written, so that a CPU takes the memory before the size of the KV cache is decided.
    """
    counts = [math.prod(shape) for shape in shapes]
    room = [-(-count // ALIGNMENT) * ALIGNMENT for count in counts]
    pieces = torch.empty(sum(room), dtype=dtype, device=device).zero_().split(room)
    return [piece[:count].view(shape) for piece, count, shape in zip(pieces, counts, shapes, strict=True)]


__all__ = ["AdapterSlots"]
