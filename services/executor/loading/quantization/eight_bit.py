"""Formats with 8 bits for a weight, as they are: float8 e4m3, or int8 that multiplies int8 activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.quantized import FP8_BLOCK, Fp8Weight, Int8Weight
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import Along, Part, TensorSpec
from pagewire.services.executor.loading.quantization.dummy import random_bytes
from pagewire.services.executor.loading.quantization.settings import SCALE_DTYPES, checked_scales
from pagewire.services.executor.loading.weights.dummy import STD


@dataclass(frozen=True)
class Fp8Format:
    """`weight` and its scale: of the tensor, of each output, or of blocks of 128 x 128."""

    blocks: bool
    scale: str = "weight_scale"  # suffix of the tensor's name
    input_scale: str | None = None  # None: activations are quantized when they are known

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        scale = _scale_spec(out_features)
        if self.blocks:
            scale = TensorSpec(
                (-(-out_features // FP8_BLOCK), -(-in_features // FP8_BLOCK)),
                SCALE_DTYPES,
                outputs=Along(0, FP8_BLOCK, together=True),
                inputs=Along(1, FP8_BLOCK),
            )
        shape = (out_features, in_features)
        weight = TensorSpec(shape, (torch.float8_e4m3fn,), outputs=Along(0), inputs=Along(1))
        return {"weight": weight, self.scale: scale} | _input_spec(self.input_scale)

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> Fp8Weight:
        weight = tensors["weight"]
        if bool(weight.view(torch.uint8).bitwise_and(0x7F).eq_(0x7F).any()):
            raise ModelLoadError(
                "weight: has values that are not numbers; the checkpoint is damaged, download it again"
            )
        scales = _weight_scales(self.scale, tensors[self.scale])
        if not self.blocks:
            scales = scales.flatten().expand(out_features).contiguous()
        return Fp8Weight(weight, scales, _input_scale(tensors, self.input_scale))

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> Fp8Weight:
        # Sign, lowest exponent bit and mantissa are random: numbers from 0.5 to 2.
        codes = random_bytes(out_features, in_features, generator).bitwise_and_(0x8F).bitwise_or_(0x30)
        shape = self.tensors(out_features, in_features)[self.scale].shape if self.blocks else (out_features,)
        return Fp8Weight(
            codes.view(torch.float8_e4m3fn),
            torch.full(shape, STD / 1.2),
            None if self.input_scale is None else torch.ones(1),
        )


@dataclass(frozen=True)
class Int8Format:
    """`weight` and its scale, of the tensor or of each output."""

    input_scale: str | None = None  # None: activations are quantized when they are known

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        weight = TensorSpec((out_features, in_features), (torch.int8,), outputs=Along(0), inputs=Along(1))
        return {"weight": weight, "weight_scale": _scale_spec(out_features)} | _input_spec(self.input_scale)

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> Int8Weight:
        scales = _weight_scales("weight_scale", tensors["weight_scale"])
        return Int8Weight(
            tensors["weight"],
            scales.flatten().expand(out_features).contiguous(),
            _input_scale(tensors, self.input_scale),
        )

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> Int8Weight:
        weight = random_bytes(out_features, in_features, generator).view(torch.int8)
        scale = STD / math.sqrt(2**16 / 12)  # of uniform integers the standard deviation
        input_scale = None if self.input_scale is None else torch.full((1,), 0.1)
        return Int8Weight(weight, torch.full((out_features,), scale), input_scale)


def _scale_spec(out_features: int) -> TensorSpec:
    return TensorSpec((out_features, 1), SCALE_DTYPES, also=((out_features,), (1,), ()), outputs=Along(0))


def _weight_scales(suffix: str, scales: Tensor) -> Tensor:
    """float32. 0 is that of an output without weights."""
    scales = checked_scales(suffix, scales).float()
    if bool((scales < 0).any()):
        raise ModelLoadError(
            f"{suffix}: must not be negative, found {float(scales.min())}; the checkpoint is damaged, download it again"
        )
    return scales


def _input_spec(suffix: str | None) -> dict[str, TensorSpec]:
    return {} if suffix is None else {suffix: TensorSpec((1,), SCALE_DTYPES, also=((),))}


def _input_scale(tensors: Mapping[str, Tensor], suffix: str | None) -> Tensor | None:
    if suffix is None:
        return None
    scale = checked_scales(suffix, tensors[suffix]).float().reshape(1)
    if float(scale) <= 0:
        raise ModelLoadError(
            f"{suffix}: must be positive, found {float(scale)}; the checkpoint is damaged, download it again"
        )
    return scale
