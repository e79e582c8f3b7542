"""GGUF files: each tensor has its own type, which alone determines its quantization."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import Along, Part, TensorSpec, WeightFormat
from pagewire.services.executor.loading.quantization.gguf_blocks import FORMS, decode
from pagewire.services.executor.loading.weights.dummy import STD

logger = logging.getLogger(__name__)

_DENSE = (Type.F32, Type.F16, Type.BF16, Type.F64)


@dataclass(frozen=True)
class GgufFormat:
    """Blocks of one type."""

    type: Type

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        # The shape is that of the weights; the bytes of its blocks are read.
        inputs = Along(1, *GGML_QUANT_SIZES[self.type])
        return {"weight": TensorSpec((out_features, in_features), (torch.uint8,), outputs=Along(0), inputs=inputs)}

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        weight = decode(tensors["weight"], self.type)
        for scales in (weight.scales, weight.super_scales, weight.offsets, weight.super_offsets):
            if scales is not None and scales.is_floating_point() and not scales.isfinite().all():
                row = int((~scales.isfinite()).any(dim=1).int().argmax())
                raise ModelLoadError(
                    f"weight: {self.type.name} row {row} has a scale that is infinite or NaN; the file is damaged: "
                    "download or convert it again"
                )
        return weight

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> GroupedWeight:
        block_codes, block_bytes = GGML_QUANT_SIZES[self.type]
        if in_features % block_codes:
            raise ModelLoadError(
                f"{self.type.name} has blocks of {block_codes}, which do not divide {in_features} inputs"
            )
        zeros = torch.zeros(out_features, in_features // block_codes * block_bytes, dtype=torch.uint8)
        weight = decode(zeros, self.type)
        codes = torch.randint(0, 1 << weight.bits, weight.shape, dtype=torch.uint8, generator=generator)
        values = torch.arange(1 << weight.bits).float() if weight.codebook is None else weight.codebook
        scale = STD / values.std().item()
        middle = -scale * values.mean().item()
        scales, super_scales = _constant(weight.scales, weight.super_scales, scale)
        offsets, super_offsets = _constant(weight.offsets, weight.super_offsets, middle)
        return replace(
            weight,
            codes=codes,
            scales=scales,
            super_scales=super_scales,
            offsets=offsets,
            super_offsets=super_offsets,
        )


def _constant(groups: Tensor | None, supers: Tensor | None, value: float) -> tuple[Any, Tensor | None]:
    """Returns the scales or offsets that give every group this `value`, if it has one."""
    if groups is None:
        return None, None
    if supers is None:
        return torch.full_like(groups, value), None
    return torch.ones_like(groups), torch.full_like(supers, value)


class GgufQuantization:
    """The method "gguf"; a module's format follows from its weight's type."""

    method = "gguf"

    def __init__(self, types: Mapping[str, Type]) -> None:
        """types: of all tensors, by the checkpoint's names (`model.layers.0.mlp.up_proj.weight`)."""
        self._types = types
        others = Counter(type_.name for type_ in types.values() if type_ not in FORMS and type_ not in _DENSE)
        if others:
            counts = ", ".join(f"{count} of type {name}" for name, count in sorted(others.items()))
            logger.warning("tensors that are dequantized, as there is no kernel for them: %s", counts)

    def format(self, module: str) -> WeightFormat | None:
        type_ = self._types.get(f"{module}.weight")
        return GgufFormat(type_) if type_ in FORMS else None
