"""The interface of a quantized format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagewire.kernels.quantized import QuantizedWeight, weight_only
from pagewire.services.executor.config.load_error import ModelLoadError
from pagewire.services.executor.layers.parts import Index, neighbours


@dataclass(frozen=True)
class Part:
    """A rank's share of a weight: some outputs, in ascending order, and neighboring inputs."""

    out_features: int  # of the whole
    in_features: int
    outputs: range | Tensor  # int64
    inputs: range


@dataclass(frozen=True)
class Along:
    """Outputs, or inputs, along dimension `dim` of a stored tensor: `entries` of the tensor for `count` of them.

    A part has whole counts of inputs. It may have any outputs: whole counts are read, and the surplus is dropped;
    together: none can be dropped.
    """

    dim: int
    count: int = 1
    entries: int = 1
    together: bool = False

    def index(self, chosen: range | Tensor) -> range | Tensor:
        """Returns the entries of these outputs or inputs."""
        if isinstance(chosen, range):
            return range(chosen.start // self.count * self.entries, -(-chosen.stop // self.count) * self.entries)
        counts = torch.unique(chosen // self.count)
        return neighbours((counts[:, None] * self.entries + torch.arange(self.entries, device="cpu")).flatten())


@dataclass(frozen=True)
class TensorSpec:
    """The required form of a stored tensor that a quantized weight is made of."""

    shape: tuple[int, ...]  # -1: of any length
    dtypes: tuple[torch.dtype, ...]  # any of these
    optional: bool = False
    also: tuple[tuple[int, ...], ...] = ()  # further shapes that the same numbers are stored in
    follows: str = ""  # the setting that determines the shape, e.g. "group_size 128"
    outputs: Along | None = None  # None, here and below: the whole tensor is read for any part
    inputs: Along | None = None
    view: tuple[int, ...] | None = None  # a shape in which outputs and inputs have dimensions

    def index(self, part: Part, found: tuple[int, ...]) -> tuple[Index, ...]:
        """Returns the index to read of the tensor, of shape `found`, for a part of the weight."""
        index: list[Index] = [None] * max(2, len(self.view or found))
        for along, chosen, total in (
            (self.outputs, part.outputs, part.out_features),
            (self.inputs, part.inputs, part.in_features),
        ):
            if along is None or chosen == range(total):
                continue
            if self.view is None and (along.dim >= len(found) or found[along.dim] != self.shape[along.dim]):
                continue  # one number for all
            index[along.dim] = along.index(chosen)
        return tuple(index)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return any(
            len(shape) == len(allowed) and all(size in (-1, found) for size, found in zip(allowed, shape, strict=True))
            for allowed in (self.shape, *self.also)
        )


class WeightFormat(Protocol):
    """The stored form of one linear module's weight."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        """Returns suffix of the tensor's name, e.g. "qweight", -> required form.

        "bias" is for a layer without a bias: some tools write zeros, which `read` may ignore.
        Raises ModelLoadError if a weight of this shape cannot be stored (the group size does not divide it, ...).
        """

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> QuantizedWeight:
        """Returns the weight, from tensors that fit `tensors()`; an optional one may be missing.

        part: the weight is this part of a larger one; `TensorSpec.index` selected the given tensors from those of it.

        Raises ModelLoadError, naming the suffix, for impossible values.
        """

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> QuantizedWeight:
        """Returns random numbers of a plausible size in `read`'s form; for `--load-format dummy`."""


@dataclass(frozen=True)
class WeightOnly:
    """A `format` with inputs that are never quantized, even if it would quantize them."""

    format: WeightFormat

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        return self.format.tensors(out_features, in_features)

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> QuantizedWeight:
        return weight_only(self.format.read(tensors, out_features, in_features, part))

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> QuantizedWeight:
        return weight_only(self.format.random(out_features, in_features, generator))


class Quantization(Protocol):
    """A checkpoint's quantization: which modules are quantized, and how."""

    method: str  # as in config.json's quant_method, or "gguf"

    def format(self, module: str) -> WeightFormat | None:
        """Returns the format of the linear module or embedding of this name (`model.layers.0.mlp.up_proj`); None: it is
        not quantized."""


def input_unit(weight_format: WeightFormat | None, out_features: int, in_features: int) -> int:
    """Shares of a weight's inputs must be multiples of this."""
    return (
        1 if weight_format is None else _unit(spec.inputs for spec in _specs(weight_format, out_features, in_features))
    )


def output_unit(weight_format: WeightFormat | None, out_features: int, in_features: int) -> int:
    """Returns the same for outputs."""
    if weight_format is None:
        return 1
    specs = _specs(weight_format, out_features, in_features)
    return _unit(spec.outputs for spec in specs if spec.outputs is not None and spec.outputs.together)


def _specs(weight_format: WeightFormat, out_features: int, in_features: int) -> list[TensorSpec]:
    try:
        return list(weight_format.tensors(out_features, in_features).values())
    except ModelLoadError:  # raised again when the whole weight is checked
        return []


def _unit(alongs: Iterable[Along | None]) -> int:
    return math.lcm(*(along.count for along in alongs if along is not None))
