"""Keeps weights of some layers in host memory (`--cpu-offload-gb`); `models.streaming` brings them to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pagewire.kernels.quantized import PackedWeight
from pagewire.services.executor.config.model_config import ModelConfig, ModelLoadError
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.copies import Copies
from pagewire.services.executor.device.memory import mib
from pagewire.services.executor.layers.weights import WeightModule
from pagewire.services.executor.loading.twins import twins
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.models.streaming import BUFFERS, StreamedWeights

logger = logging.getLogger(__name__)

_ALIGNMENT = 256  # bytes, of each tensor in a buffer
ModuleBytes = Callable[[WeightModule], int]


@runtime_checkable
class StreamingModel(Protocol):
    """A model that can have weights of its layers in host memory."""

    config: ModelConfig
    layers: Sequence[Any]
    arriving: Callable[[Sequence[Any]], Iterable[Any]]  # yields layers, each when its weights are on the device


@dataclass(frozen=True)
class Offload:
    """The layers with weights in host memory."""

    layers: tuple[int, ...]  # indices among the layers of this stage, ascending
    host_bytes: int = 0
    buffer_bytes: int = 0  # on the device, in their place

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes that the device does not need."""
        return self.host_bytes - self.buffer_bytes


NOTHING = Offload(())


def choose(model: OwnModel, num_bytes: int, module_bytes: ModuleBytes) -> Offload:
    """Chooses as many layers as num_bytes hold, evenly spread, so that copies have layers between to hide behind.

    Raises ModelLoadError for a model without such layers, if nothing would be saved, or if the host lacks memory.
    """
    flag = f"--cpu-offload-gb {num_bytes / 2**30:g}"
    if not isinstance(model, StreamingModel):
        raise ModelLoadError(
            f"{flag}: the layers of {model.config.architecture} cannot be streamed from host memory; leave the flag out"
        )
    sizes = [_layer_bytes(layer, module_bytes) for layer in model.layers]
    options = (_spread(sizes, count) for count in range(len(sizes), BUFFERS, -1))
    chosen = next((option for option in options if option.host_bytes <= num_bytes), NOTHING)
    if chosen.saved_bytes <= 0:
        least = _spread(sizes, min(BUFFERS + 1, len(sizes))).host_bytes
        raise ModelLoadError(
            f"{flag}: it frees nothing, because buffers for {BUFFERS} layers stay on the device and a layer has up to "
            f"{mib(max(sizes, default=0))}; give {least / 2**30:.2g} or more, or leave the flag out"
        )
    available = memory.available_cpu_bytes()
    if chosen.host_bytes > available:
        raise memory.OutOfMemoryError(
            f"{flag}: {mib(chosen.host_bytes)} of weights would be in host memory, which has {mib(available)} free; "
            "lower it"
        )
    return chosen


def _spread(sizes: Sequence[int], count: int) -> Offload:
    """Returns `count` layers; the first as late as possible, as its copy begins with the step."""
    layers = tuple((i + 1) * len(sizes) // count - 1 for i in range(count))
    chosen = [sizes[index] for index in layers]
    return Offload(layers, sum(chosen), BUFFERS * max(chosen, default=0))


def _modules(layer: object) -> Iterator[WeightModule]:
    return (leaf for leaf in layer.leaves() if isinstance(leaf, WeightModule))  # type: ignore[attr-defined]


def _layer_bytes(layer: object, module_bytes: ModuleBytes) -> int:
    return sum(map(module_bytes, _modules(layer)))


def modules_of(model: OwnModel, offload: Offload) -> set[int]:
    """Returns the ids of the modules with weights in host memory."""
    if not offload.layers:
        return set()
    assert isinstance(model, StreamingModel)
    return {id(module) for index in offload.layers for module in _modules(model.layers[index])}


def to_host(part: PackedWeight) -> None:
    """Moves a weight that was packed on the device."""
    for tensor in _tensors(part):
        _move(tensor, torch.device("cpu"))


def _move(tensor: Tensor, device: torch.device) -> None:
    with torch.inference_mode(tensor.is_inference()):  # one that is must stay one
        tensor.data = tensor.to(device)


def _tensors(value: object) -> list[Tensor]:
    return list({id(tensor): tensor for tensor, _ in twins(value, value)}.values())


def stream_layers(model: OwnModel, offload: Offload, device: torch.device, copies: Copies) -> None:
    """Moves the weights of loaded layers to page-locked memory, and has the model compute with them from the buffers.
    What else such layers have, norms and biases, goes to the device."""
    assert isinstance(model, StreamingModel)
    regions = {index: _Regions(model.layers[index]) for index in offload.layers}
    size = max(region.num_bytes for region in regions.values())
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
    host = {}
    for turn, (index, region) in enumerate(regions.items()):
        host[index] = torch.empty(region.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
        region.move(host[index], buffers[turn % BUFFERS])
        for tensor in _tensors(model.layers[index]):
            if tensor.device.type != device.type:
                _move(tensor, device)
    model.arriving = StreamedWeights(copies, buffers, host).arriving
    logger.info(
        "%d of %d layers have their weights in host memory, %s; %d buffers for them take %s of the device",
        len(host), len(model.layers), mib(sum(map(len, host.values()))), BUFFERS, mib(BUFFERS * size),
    )  # fmt: skip


class _Regions:
    """The places of a layer's weights in a buffer."""

    def __init__(self, layer: object) -> None:
        self._tensors = [
            tensor for module in _modules(layer) for part in module.parts for tensor in _tensors(part) if tensor.numel()
        ]
        self._offsets: dict[int, tuple[int, Tensor]] = {}  # of each memory that tensors share, by its address
        self.num_bytes = 0
        for tensor in self._tensors:
            memory_of = tensor.untyped_storage()
            if memory_of.data_ptr() not in self._offsets:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory_of)
                self._offsets[memory_of.data_ptr()] = (self.num_bytes, whole)
                self.num_bytes += -(-len(whole) // _ALIGNMENT) * _ALIGNMENT

    def move(self, host: Tensor, buffer: Tensor) -> None:
        for offset, whole in self._offsets.values():
            host[offset : offset + len(whole)].copy_(whole)
        for tensor in self._tensors:
            offset, _ = self._offsets[tensor.untyped_storage().data_ptr()]
            first = offset // tensor.element_size() + tensor.storage_offset()
            with torch.inference_mode(tensor.is_inference()):
                place = torch.empty(0, dtype=tensor.dtype, device=buffer.device)
                tensor.data = place.set_(buffer.untyped_storage(), first, tensor.size(), tensor.stride())
        self._offsets.clear()
