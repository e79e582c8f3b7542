"""Weight-only integers of compressed-tensors: packed in words ("pack-quantized") or one to a byte.

Source: compressed-tensors 0.20, `compressors/pack_quantized/`, `compressors/naive_quantized/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import Along, Part, TensorSpec
from pagewire.services.executor.loading.quantization.dummy import random_grouped
from pagewire.services.executor.loading.quantization.gptq import group_order
from pagewire.services.executor.loading.quantization.settings import (
    SCALE_DTYPES,
    along_groups,
    checked_scales,
    first_group,
    groups_of,
)
from pagewire.services.executor.loading.quantization.unpack import unpack


@dataclass(frozen=True)
class IntegerFormat:
    """Signed integers, stored in words with half their range added. group_size -1: a scale for each output."""

    bits: int
    group_size: int
    symmetric: bool
    packed: bool
    per_tensor: bool  # one scale, and one zero point, for all
    act_order: bool = False  # any inputs may be in a group

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        size, groups = groups_of(in_features, self.group_size)
        outputs, inputs, per_word = Along(0), along_groups(1, size, groups), 32 // self.bits
        by_group = (out_features, groups)
        scale_shapes = ((out_features,), (1,), ()) if groups == 1 else ()
        grouped = "the strategy" if self.group_size == -1 else f"group_size {self.group_size}"
        specs = {
            "weight_scale": TensorSpec(
                by_group, SCALE_DTYPES, also=scale_shapes, follows=grouped, outputs=outputs, inputs=inputs
            )
        }
        if self.packed:
            shape = (out_features, self._words(in_features))
            specs["weight_packed"] = TensorSpec(
                shape, (torch.int32,), follows=f"num_bits {self.bits}", outputs=outputs, inputs=Along(1, per_word)
            )
            specs["weight_shape"] = TensorSpec((2,), (torch.int64, torch.int32), optional=True)
        else:
            specs["weight"] = TensorSpec((out_features, in_features), (torch.int8,), outputs=outputs, inputs=Along(1))
        if self.group_size != -1:
            specs["weight_g_idx"] = TensorSpec(
                (in_features,),
                (torch.int32, torch.int64),
                optional=True,
                inputs=Along(0, in_features, in_features) if self.act_order and groups > 1 else Along(0),
            )
        if not self.symmetric:
            zero = TensorSpec(by_group, (torch.int8,), also=scale_shapes, outputs=outputs, inputs=inputs)
            if self.packed and not self.per_tensor:
                words = (self._words(out_features), groups)
                zero = TensorSpec(words, (torch.int32,), outputs=Along(0, per_word), inputs=inputs)
            specs["weight_zero_point"] = zero
        return specs

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        size, groups = groups_of(in_features, self.group_size)
        shape = tensors.get("weight_shape")
        whole = [out_features, in_features] if part is None else [part.out_features, part.in_features]
        if shape is not None and shape.tolist() != whole:
            raise ModelLoadError(f"weight_shape: expected {whole}, found {shape.tolist()}")
        codes = (
            unpack(tensors["weight_packed"], self.bits)[:, :in_features]
            if self.packed
            else self._unsigned(tensors["weight"])
        )
        permutation = None
        if "weight_g_idx" in tensors:
            g_idx = tensors["weight_g_idx"] - first_group(part, self.group_size)
            permutation = group_order("weight_g_idx", g_idx, size, groups)
        if permutation is not None:
            codes = codes.index_select(1, permutation)
        scales = checked_scales("weight_scale", tensors["weight_scale"])
        return GroupedWeight(
            codes.contiguous(),
            self.bits,
            size,
            _by_group(scales, out_features, groups),
            offsets=None if self.symmetric else self._zeros(tensors["weight_zero_point"], out_features, groups),
            zero_point=self._middle if self.symmetric else 0,
            permutation=permutation,
        )

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> GroupedWeight:
        shape = (out_features, in_features)
        return random_grouped(shape, self.bits, self.group_size, generator, has_offsets=not self.symmetric)

    @property
    def _middle(self) -> int:
        return 2 ** (self.bits - 1)

    def _words(self, size: int) -> int:
        return -(-size * self.bits // 32)

    def _unsigned(self, values: Tensor) -> Tensor:
        return (values.to(torch.int16) + self._middle).to(torch.uint8)

    def _zeros(self, stored: Tensor, out_features: int, groups: int) -> Tensor:
        """uint8 [N, G]"""
        if stored.dtype is torch.int32:  # several outputs in a word
            return unpack(stored.t(), self.bits).t()[:out_features].contiguous()
        return _by_group(self._unsigned(stored), out_features, groups)


def _by_group(values: Tensor, out_features: int, groups: int) -> Tensor:
    """[N, G] of as many, or of one for each output or of one for all."""
    values = values if values.dim() == 2 else values.reshape(-1, 1)
    return values.expand(out_features, groups).contiguous()
