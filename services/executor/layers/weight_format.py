"""What a quantized format must provide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagewire.kernels.quantized import QuantizedWeight, weight_only


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a quantized weight is made of, as the checkpoint must have it."""

    shape: tuple[int, ...]  # -1: of any length
    dtypes: tuple[torch.dtype, ...]  # any of these
    optional: bool = False
    also: tuple[tuple[int, ...], ...] = ()  # further shapes that the same numbers are stored in
    follows: str = ""  # what in the config the shape follows from, e.g. "group_size 128"

    def fits(self, shape: tuple[int, ...]) -> bool:
        return any(
            len(shape) == len(allowed) and all(size in (-1, found) for size, found in zip(allowed, shape, strict=True))
            for allowed in (self.shape, *self.also)
        )


class WeightFormat(Protocol):
    """How the weight of one linear module is stored."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        """Suffix of the tensor's name, e.g. "qweight", -> what it must look like.

        "bias" is that of a layer without one: some tools write zeros, which `read` may ignore.
        Raises ModelLoadError if no weight of this shape can be stored so (a group size that does not divide, ...).
        """

    def read(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """The weight, from tensors that fit `tensors()`; an optional one may be missing.

        Raises ModelLoadError, naming the suffix, for values that cannot be.
        """

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> QuantizedWeight:
        """Random numbers of a plausible size in the form that `read` gives; for `--load-format dummy`."""


@dataclass(frozen=True)
class WeightOnly:
    """As `format`, but inputs stay as they are even where it quantizes them."""

    format: WeightFormat

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        return self.format.tensors(out_features, in_features)

    def read(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        return weight_only(self.format.read(tensors, out_features, in_features))

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> QuantizedWeight:
        return weight_only(self.format.random(out_features, in_features, generator))


class Quantization(Protocol):
    """A checkpoint's quantization: which modules, and how."""

    method: str  # as in config.json's quant_method, or "gguf"

    def format(self, module: str) -> WeightFormat | None:
        """Of the linear module or embedding of this name (`model.layers.0.mlp.up_proj`); None: it is not quantized."""
