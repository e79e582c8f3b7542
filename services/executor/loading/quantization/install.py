"""Reads a model's quantized weights, packs them for the device and installs them."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pagewire.kernels.quantized import PackedWeight, QuantizedWeight, columns, pack, stack, take_rows, to_device
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.parts import neighbours, select
from pagewire.services.executor.layers.weight_format import Part, TensorSpec
from pagewire.services.executor.layers.weights import Dense, Shard
from pagewire.services.executor.loading.quantization.dequantize import dequantize_into
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.dummy import STD
from pagewire.services.executor.loading.weights.jobs import Job

# Limit of weights that are being packed at a time: each takes a byte when read, one when stacked, and packing takes
# some more. A larger module is packed alone.
_MAX_WEIGHTS_IN_FLIGHT = 1 << 28

Read = Callable[[Shard], QuantizedWeight | Tensor]


class Installed(Protocol):
    """Takes the weight of its shards."""

    @property
    def shards(self) -> tuple[Shard, ...]: ...

    def install(self, parts: Sequence[PackedWeight]) -> None: ...


def tensor_specs(shard: Shard) -> dict[str, TensorSpec]:
    """Returns the tensors of a quantized shard. Raises ModelLoadError naming the module if its shape cannot be stored
    in this format."""
    assert shard.format is not None
    try:
        specs = dict(shard.format.tensors(shard.out_features, shard.in_features))
    except ModelLoadError as error:
        raise ModelLoadError(f"module {shard.name}: {error}") from error
    if shard.has_bias:
        specs.pop("bias", None)
    return specs


def check_shard(weights: WeightSource, shard: Shard) -> list[str]:
    """Names of a quantized shard's tensors that are missing. Raises ModelLoadError for a wrong shape or type."""
    missing = []
    for suffix, spec in tensor_specs(shard).items():
        name = f"{shard.name}.{suffix}"
        if name not in weights.shapes:
            missing += [] if spec.optional else [name]
            continue
        if not spec.fits(weights.shapes[name]):
            expected = " or ".join(str(list(shape)) for shape in (spec.shape, *spec.also))
            cause = f"{spec.follows} in its config is wrong" if spec.follows else "its config is another model's"
            raise ModelLoadError(
                f"tensor {name}: expected shape {expected}, found {list(weights.shapes[name])}; {cause}, or the "
                "checkpoint is damaged"
            )
        if weights.raw_dtype(name) not in spec.dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
            found = str(weights.raw_dtype(name)).removeprefix("torch.")
            raise ModelLoadError(
                f"tensor {name}: expected {expected}, found {found}; its config is another model's, or the checkpoint "
                "is damaged"
            )
    return missing


def read_shard(weights: WeightSource, shard: Shard, device: torch.device) -> QuantizedWeight:
    """Returns the shard unpacked on `device`, in new memory. Raises ModelLoadError naming an invalid module."""
    assert shard.format is not None
    specs = tensor_specs(shard)
    part, order = part_to_read(shard, specs)
    tensors = {}
    for suffix, spec in specs.items():
        if (name := f"{shard.name}.{suffix}") in weights.shapes:
            stored = (
                weights.raw(name)
                if part is None
                else weights.raw(name, spec.index(part, weights.shapes[name]), spec.view)
            )
            tensors[suffix] = stored.to(device, copy=True, memory_format=torch.contiguous_format)
    outputs = shard.out_features if part is None else len(part.outputs)
    try:
        weight = to_device(shard.format.read(tensors, outputs, shard.num_inputs, part), device)
        return weight if order is None else in_order(weight, order, shard)
    except ModelLoadError as error:
        raise ModelLoadError(f"tensor {shard.name}.{error}") from error
    except (ValueError, IndexError, OverflowError) as error:
        raise ModelLoadError(
            f"module {shard.name}: its tensors cannot be unpacked ({error}); the checkpoint is damaged, download it "
            "again"
        ) from error


def stored_shards(path: Path, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> Read:
    """Reads shards of the checkpoint at `path`; those that are not quantized in `dtype`."""

    def read(shard: Shard) -> QuantizedWeight | Tensor:
        if shard.format is not None:
            try:
                return read_shard(weights, shard, device)
            except ModelLoadError as error:
                raise ModelLoadError(f"{path}: {error}") from error
        tensor = torch.empty(shard.num_outputs, shard.num_inputs, dtype=dtype)
        weights.read_into(f"{shard.name}.weight", tensor, part=shard.stored_weight())
        return tensor.to(device)

    return read


def part_to_read(shard: Shard, specs: Mapping[str, TensorSpec]) -> tuple[Part | None, Tensor | None]:
    """Returns (the part of a shard to read, None = all; the rows of that part to take, in order: int64, None = all in
    order).

    Tensors may hold outputs in words or blocks, of which the whole is read.
    """
    inputs = range(shard.in_features) if shard.inputs is None else shard.inputs
    outputs, order = range(shard.out_features), shard.rows
    if shard.rows is not None:
        unit = math.lcm(*(spec.outputs.count for spec in specs.values() if spec.outputs is not None))
        units, places = torch.unique(shard.rows // unit, return_inverse=True)
        read = (units[:, None] * unit + torch.arange(unit, device="cpu")).flatten()
        read = neighbours(read[read < shard.out_features])
        order = places * unit + shard.rows % unit
        if len(order) == len(read) and neighbours(order) == range(len(read)):
            order = None
        if isinstance(read, Tensor):
            return Part(shard.out_features, shard.in_features, read, inputs), order
        outputs = read
    if len(outputs) == shard.out_features and len(inputs) == shard.in_features:
        return None, order
    return Part(shard.out_features, shard.in_features, outputs, inputs), order


def in_order(weight: QuantizedWeight, order: Tensor, shard: Shard) -> QuantizedWeight:
    """Returns a shard's weight with its rows in the model's order."""
    try:
        return take_rows(weight, order)
    except ValueError as error:
        raise ModelLoadError(
            f"module {shard.name}: its rows must change places, but {error}; leave it unquantized, or use a format "
            "with a scale per output"
        ) from error


def random_shards(seed: int, dtype: torch.dtype, device: torch.device) -> Read:
    """Makes random shards, each a function of `seed` and its name alone: threads make them in any order."""

    def read(shard: Shard) -> QuantizedWeight | Tensor:
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(shard.name.encode()))
        if shard.format is not None:
            whole = shard.format.random(shard.out_features, shard.in_features, generator)
            part = whole if shard.inputs is None else columns(whole, shard.inputs.start, shard.inputs.stop)
            return to_device(part if shard.rows is None else in_order(part, shard.rows, shard), device)
        tensor = torch.empty(shard.out_features, shard.in_features, dtype=dtype)
        tensor.normal_(0.0, STD, generator=generator)
        part_of = shard.stored_weight()
        return (tensor if part_of is None else select(tensor, part_of.index)).to(device)

    return read


def install_jobs(
    modules: Sequence[Installed],
    read: Read,
    num_bytes: Callable[[Shard], int],
    dense: Callable[[int, int], Tensor] | None = None,
) -> list[Job]:
    """Returns a job per module, largest first: read, pack and install its weight.

    read: returns a shard's weight on its device. num_bytes: returns its share of the progress.
    dense: None, or returns memory [N, K] for weights, which are then dequantized.
    """
    budget = _Budget(_MAX_WEIGHTS_IN_FLIGHT)

    def load(module: Installed) -> None:
        with budget.spent(_size(module)):
            parts = _packed(map(read, module.shards)) if dense is None else [_dequantized(module, read, dense)]
            module.install(parts)

    return [
        Job(module.shards[0].name, sum(map(num_bytes, module.shards)), partial(load, module))
        for module in sorted(modules, key=lambda module: -_size(module))
    ]


class _Budget:
    """A budget of costs at a time; a cost above the whole budget waits until nothing else is spent."""

    def __init__(self, amount: int) -> None:
        self._amount = self._left = amount
        self._returned = threading.Condition()

    @contextmanager
    def spent(self, cost: int) -> Iterator[None]:
        cost = min(cost, self._amount)
        with self._returned:
            self._returned.wait_for(lambda: self._left >= cost)
            self._left -= cost
        try:
            yield
        finally:
            with self._returned:
                self._left += cost
                self._returned.notify_all()


def num_weights(shard: Shard) -> int:
    return shard.num_weights


def _size(module: Installed) -> int:
    return sum(map(num_weights, module.shards))


def _packed(weights: Iterator[QuantizedWeight | Tensor]) -> list[PackedWeight]:
    """Merges neighbours of the same form into one weight."""
    parts: list[PackedWeight] = []
    run: list[QuantizedWeight] = []

    def end_run() -> None:
        if run:
            parts.append(pack(stack(run)))
            run.clear()

    for weight in weights:
        if isinstance(weight, Tensor):
            end_run()
            parts.append(Dense(weight))
            continue
        if run and not run[-1].stacks_with(weight):
            end_run()
        run.append(weight)
    end_run()
    return parts


def _dequantized(module: Installed, read: Read, empty: Callable[[int, int], Tensor]) -> Dense:
    """Writes all shards side by side to one dense weight."""
    sizes = [shard.num_outputs for shard in module.shards]
    whole = empty(sum(sizes), module.shards[0].num_inputs)
    for shard, rows in zip(module.shards, whole.split(sizes), strict=True):
        weight = read(shard)
        if isinstance(weight, Tensor):
            rows.copy_(weight)
        else:
            dequantize_into(rows, weight)
    return Dense(whole)
