"""The format bitsandbytes, as transformers saves it: 4-bit nf4 and fp4 with 16 numbers to look up, or int8 with a scale
per output.

Source: bitsandbytes 0.50, `QuantState.as_dict` and `dequantize_4bit` in `functional.py` and `backends/default/ops.py`,
`Linear8bitLt._save_to_state_dict` in `nn/modules.py`. int8 weights multiply activations as they are: the format's own
way, int8 products with outliers apart, approximates that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight, Int8Weight
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.parts import select
from pagewire.services.executor.layers.weight_format import Along, Part, TensorSpec, WeightFormat
from pagewire.services.executor.loading.quantization.dummy import random_bytes, random_grouped
from pagewire.services.executor.loading.quantization.settings import (
    checked_scales,
    one_of,
    stored_quantized,
    strings_of,
)
from pagewire.services.executor.loading.weights.dummy import STD

_BLOCK = 64  # weights that share a scale, unless the checkpoint says otherwise
_MIN_GROUP = 16
_FLOAT32 = (torch.float32,)


def quantization(config: Mapping[str, Any], names: Collection[str] | None) -> BitsAndBytesQuantization:
    """Raises ModelLoadError naming the key for what is not supported."""
    is_4bit = one_of(config, "load_in_4bit", [True, False], default=False)
    if is_4bit == one_of(config, "load_in_8bit", [True, False], default=False):
        raise ModelLoadError("config keys quantization_config.load_in_4bit and load_in_8bit: one of both must be true")
    kind = one_of(config, "bnb_4bit_quant_type", ["nf4", "fp4"], default="fp4")
    weight_format: WeightFormat = FourBitFormat(kind) if is_4bit else EightBitFormat()
    return BitsAndBytesQuantization(
        weight_format, "weight.absmax" if is_4bit else "SCB", strings_of(config, "llm_int8_skip_modules"), names
    )


class BitsAndBytesQuantization:
    """The same quantization of all linear layers, except those left dense."""

    method = "bitsandbytes"

    def __init__(
        self, weight_format: WeightFormat, suffix: str, dense: tuple[str, ...], names: Collection[str] | None
    ) -> None:
        self._format = weight_format
        self._suffix = suffix
        self._dense = dense
        self._names = names

    def format(self, module: str) -> WeightFormat | None:
        return self._format if stored_quantized(module, self._suffix, self._names, self._dense) else None


@dataclass(frozen=True)
class FourBitFormat:
    """Two codes to a byte, the first in its high bits; a scale for each block of the flattened weight."""

    kind: str  # nf4 or fp4

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        stored = TensorSpec((-(-out_features * in_features // 2), 1), (torch.uint8,))
        if in_features % 2 == 0:  # rows begin with a byte
            unit = math.gcd(_BLOCK, in_features)
            view = (out_features, in_features // 2)
            stored = replace(stored, view=view, outputs=Along(0), inputs=Along(1, unit, unit // 2))
        return {
            "weight": stored,
            "weight.absmax": TensorSpec((-1,), (torch.float32, torch.uint8)),
            "weight.quant_map": TensorSpec((16,), _FLOAT32),
            "weight.nested_absmax": TensorSpec((-1,), _FLOAT32, optional=True),
            "weight.nested_quant_map": TensorSpec((256,), _FLOAT32, optional=True),
            self._state: TensorSpec((-1,), (torch.uint8,)),
        }

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        rows, width = (out_features, in_features) if part is None else (part.out_features, part.in_features)
        state = self._checked_state(tensors[self._state], [rows, width])
        block_size = _positive(state, "blocksize", self._state)
        size = math.gcd(block_size, width)  # a block may reach into the next row
        if size < _MIN_GROUP:
            raise ModelLoadError(
                f"weight: rows of {width} cannot be cut into blocks of {block_size} or equal parts of them of at "
                f"least {_MIN_GROUP}; leave this module unquantized"
            )
        scales = self._scales(tensors, state, -(-rows * width // block_size))
        scales = scales.repeat_interleave(block_size // size)[: rows * width // size].view(rows, width // size)
        if part is not None:
            if part.inputs.start % size or len(part.inputs) % size:
                raise ModelLoadError(
                    f"{self._state}: blocks of {block_size} cannot be split at input {part.inputs.start}"
                )
            groups = range(part.inputs.start // size, part.inputs.stop // size)
            scales = select(scales, (part.outputs, groups)).contiguous()
        packed = tensors["weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[: out_features * in_features]
        return GroupedWeight(
            codes.view(out_features, in_features),
            4,
            size,
            scales,
            codebook=checked_scales("weight.quant_map", tensors["weight.quant_map"]),
        )

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> GroupedWeight:
        size = math.gcd(_BLOCK, in_features)
        codebook = torch.linspace(-1.0, 1.0, 16)
        scales = torch.full((out_features, in_features // size), STD / float(codebook.std(correction=0)))
        codes = random_bytes(out_features, in_features, generator).bitwise_and_(15)
        return GroupedWeight(codes, 4, size, scales, codebook=codebook)

    def _checked_state(self, stored: Tensor, shape: list[int]) -> dict[str, Any]:
        try:
            state = json.loads(bytes(stored.tolist()))
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{self._state}: cannot be read as JSON ({error})") from error
        if not isinstance(state, dict) or state.get("quant_type") != self.kind or state.get("shape") != shape:
            raise ModelLoadError(
                f"{self._state}: expected an object with quant_type {self.kind!r} and shape {shape}, found {state}"
            )
        return state

    def _scales(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], num_blocks: int) -> Tensor:
        """Returns float32 [num_blocks]; stored as such, or as codes of 8 bits in separate blocks."""
        absmax = tensors["weight.absmax"]
        if len(absmax) != num_blocks:
            raise ModelLoadError(f"weight.absmax: expected {num_blocks} scales, found {len(absmax)}")
        if absmax.dtype is not torch.uint8:
            return checked_scales("weight.absmax", absmax)
        for suffix in ("weight.nested_absmax", "weight.nested_quant_map"):
            if suffix not in tensors:
                raise ModelLoadError(f"{suffix}: is missing, but weight.absmax has codes that need it")
        block_size = _positive(state, "nested_blocksize", self._state)
        nested, offset = tensors["weight.nested_absmax"], state.get("nested_offset")
        if len(nested) != -(-num_blocks // block_size) or not isinstance(offset, float | int):
            raise ModelLoadError(
                f"weight.nested_absmax: expected {-(-num_blocks // block_size)} scales and a nested_offset in "
                f"{self._state}, found {len(nested)} and {offset!r}"
            )
        values = tensors["weight.nested_quant_map"][absmax.int()]
        scales = values * nested.repeat_interleave(block_size)[:num_blocks] + offset
        return checked_scales("weight.nested_absmax", scales)


class EightBitFormat:
    """Weights as int8 in [-127, 127], scaled by each output's largest weight."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        return {
            "weight": TensorSpec((out_features, in_features), (torch.int8,), outputs=Along(0), inputs=Along(1)),
            "SCB": TensorSpec((out_features,), _FLOAT32, outputs=Along(0)),
            "weight_format": TensorSpec((), (torch.uint8,), optional=True),
        }

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        layout = tensors.get("weight_format")
        if layout is not None and int(layout) != 0:
            raise ModelLoadError(
                f"weight_format: layout {int(layout)} is not supported, expected 0 (rows); save the checkpoint again "
                "with a current bitsandbytes"
            )
        scales = checked_scales("SCB", tensors["SCB"]) / 127
        return Int8Weight(tensors["weight"], scales).as_grouped()

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> GroupedWeight:
        return random_grouped((out_features, in_features), 8, -1, generator, has_offsets=False)


def _positive(state: Mapping[str, Any], key: str, suffix: str) -> int:
    value = state.get(key)
    if type(value) is not int or value <= 0:
        raise ModelLoadError(f"{suffix}: key {key}: expected a positive integer, found {value!r}")
    return value
