"""MXFP4, as GPT-OSS stores its experts: 4-bit floats, 32 of which share a power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0, and transformers' `convert_moe_packed_tensors`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import Along, Part, TensorSpec
from pagewire.services.executor.loading.quantization.dummy import random_bytes
from pagewire.services.executor.loading.quantization.settings import stored_quantized, strings_of
from pagewire.services.executor.loading.weights.dummy import STD

BLOCK = 32  # weights that share a scale
# e2m1: the values of the codes
E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
_BIAS, _NAN = 127, 255  # of the scales, exponents in e8m0


def quantization(config: Mapping[str, Any], names: Collection[str] | None) -> Mxfp4Quantization:
    """Raises ModelLoadError naming the key for what is not supported."""
    return Mxfp4Quantization(strings_of(config, "modules_to_not_convert"), names)


class Mxfp4Quantization:
    """The modules with blocks in the checkpoint. `dense`: patterns such as `model.layers.*.self_attn`."""

    method = "mxfp4"

    def __init__(self, dense: tuple[str, ...], names: Collection[str] | None) -> None:
        self._dense = dense
        self._names = names

    def format(self, module: str) -> Mxfp4Format | None:
        is_dense = any(fnmatchcase(module, f"*{pattern}*") for pattern in self._dense)
        return Mxfp4Format() if stored_quantized(module, "blocks", self._names, [module] * is_dense) else None


class Mxfp4Format:
    """Two codes to a byte, the first in its low bits."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        if in_features % BLOCK:
            raise ModelLoadError(f"rows of {in_features} weights cannot be cut into blocks of {BLOCK}")
        num_blocks = in_features // BLOCK
        return {
            "blocks": TensorSpec(
                (out_features, num_blocks, BLOCK // 2), (torch.uint8,), outputs=Along(0), inputs=Along(1, BLOCK)
            ),
            "scales": TensorSpec((out_features, num_blocks), (torch.uint8,), outputs=Along(0), inputs=Along(1, BLOCK)),
        }

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        blocks, exponents = tensors["blocks"], tensors["scales"]
        if bool((exponents == _NAN).any()):
            raise ModelLoadError("scales: a scale is not a number; the checkpoint is damaged, download it again")
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(out_features, in_features)
        scales = torch.exp2(exponents.float() - _BIAS)
        return GroupedWeight(codes, 4, BLOCK, scales, codebook=E2M1)

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> GroupedWeight:
        codes = random_bytes(out_features, in_features, generator).bitwise_and_(15)
        scales = torch.full((out_features, in_features // BLOCK), STD / float(E2M1.std(correction=0)))
        return GroupedWeight(codes, 4, BLOCK, scales, codebook=E2M1)
