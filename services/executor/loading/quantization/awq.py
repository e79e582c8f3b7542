"""AWQ as AutoAWQ writes it: 4 bits, a scale and a zero point per group; its layouts gemm, gemv and gemv_fast.

Sources: `awq/modules/linear/{gemm,gemv,gemv_fast}.py` of AutoAWQ 0.2.9.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import Along, Part, TensorSpec, WeightFormat
from pagewire.services.executor.loading.quantization.dummy import random_grouped
from pagewire.services.executor.loading.quantization.settings import (
    SCALE_DTYPES,
    along_groups,
    check_multiple,
    checked_scales,
    group_size_of,
    groups_of,
    one_of,
    stored_quantized,
    strings_of,
)
from pagewire.services.executor.loading.quantization.unpack import bytes_of, unpack

BITS = (4,)
_BITS = BITS[0]
_ZERO_POINT = 8  # of weights without stored zero points
_PER_WORD = 32 // _BITS
_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)  # "gemm": the column at each place of a word of eight


def quantization(config: Mapping[str, Any], names: Collection[str] | None) -> AwqQuantization:
    """Raises ModelLoadError naming the key for what is not supported."""
    one_of(config, "w_bit" if "w_bit" in config else "bits", BITS)
    group_size = group_size_of(config, "q_group_size" if "q_group_size" in config else "group_size")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version not in _FORMATS:
        raise ModelLoadError(
            f"config key quantization_config.version: {version!r} is not supported, expected one of "
            f"{', '.join(_FORMATS)}; quantize the model again with version gemm"
        )
    has_zeros = one_of(config, "zero_point", [True, False], default=True)
    return AwqQuantization(
        _FORMATS[version](group_size, has_zeros), strings_of(config, "modules_to_not_convert"), names
    )


class AwqQuantization:
    """The same quantization of all linear layers, except those left dense."""

    method = "awq"

    def __init__(self, weight_format: WeightFormat, dense: tuple[str, ...], names: Collection[str] | None) -> None:
        self._format = weight_format
        self._dense = dense
        self._names = names

    def format(self, module: str) -> WeightFormat | None:
        return self._format if stored_quantized(module, "qweight", self._names, self._dense) else None


@dataclass(frozen=True)
class _AwqFormat:
    group_size: int
    has_zeros: bool

    @property
    def follows(self) -> str:
        return f"group_size {self.group_size}"

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> GroupedWeight:
        shape = (out_features, in_features)
        return random_grouped(shape, _BITS, self.group_size, generator, has_offsets=self.has_zeros)


class GemmFormat(_AwqFormat):
    """Words of eight outputs each, in the order of AutoAWQ's kernel."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        check_multiple("the number of outputs", out_features, _PER_WORD)
        size, groups = groups_of(in_features, self.group_size)
        num_words, words, by_group = out_features // _PER_WORD, Along(1, _PER_WORD), along_groups(0, size, groups)
        return {
            "qweight": TensorSpec((in_features, num_words), (torch.int32,), outputs=words, inputs=Along(0)),
            "qzeros": TensorSpec(
                (groups, num_words),
                (torch.int32,),
                not self.has_zeros,
                follows=self.follows,
                outputs=words,
                inputs=by_group,
            ),
            "scales": TensorSpec(
                (groups, out_features), SCALE_DTYPES, follows=self.follows, outputs=Along(1), inputs=by_group
            ),
        }

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        zeros = tensors.get("qzeros")
        return GroupedWeight(
            _unpack_columns(tensors["qweight"]),
            _BITS,
            groups_of(in_features, self.group_size)[0],
            checked_scales("scales", tensors["scales"]).t().contiguous(),
            offsets=None if zeros is None else _unpack_columns(zeros),
            zero_point=_ZERO_POINT if zeros is None else 0,
        )


class GemvFormat(_AwqFormat):
    """Words of eight inputs each; zero points and scales padded to whole kernel steps."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        check_multiple("the number of inputs", in_features, _PER_WORD)
        width = _padded_words(in_features, self.group_size)
        size, groups = groups_of(in_features, self.group_size)
        return {
            "qweight": TensorSpec(
                (out_features, in_features // _PER_WORD), (torch.int32,), outputs=Along(0), inputs=Along(1, _PER_WORD)
            ),
            "qzeros": TensorSpec(
                (out_features, width),
                (torch.int32,),
                not self.has_zeros,
                follows=self.follows,
                outputs=Along(0),
                inputs=along_groups(1, size * _PER_WORD, groups),
            ),
            "scales": TensorSpec(
                (out_features, width * _PER_WORD),
                SCALE_DTYPES,
                follows=self.follows,
                outputs=Along(0),
                inputs=along_groups(1, size, groups),
            ),
        }

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        size, groups = groups_of(in_features, self.group_size)
        zeros = tensors.get("qzeros")
        return GroupedWeight(
            unpack(tensors["qweight"], _BITS),
            _BITS,
            size,
            checked_scales("scales", tensors["scales"][:, :groups]).contiguous(),
            offsets=None if zeros is None else unpack(zeros, _BITS)[:, :groups].contiguous(),
            zero_point=_ZERO_POINT if zeros is None else 0,
        )


class GemvFastFormat(_AwqFormat):
    """Words of four codes, rows and inputs interleaved; "qzeros" is -zero point * scale: added to scale * code."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        check_multiple("the number of outputs", out_features, _PER_WORD)
        check_multiple("the number of inputs", in_features, 64)
        padded = _padded_words(in_features, self.group_size) * _PER_WORD
        of_groups = TensorSpec(
            (padded, out_features),
            SCALE_DTYPES,
            follows=self.follows,
            outputs=Along(1),
            inputs=along_groups(0, *groups_of(in_features, self.group_size)),
        )
        return {
            "qweight": TensorSpec(
                (out_features // 4, in_features), (torch.int16,), outputs=Along(0, 4), inputs=Along(1, 64, 64)
            ),
            "qzeros": of_groups,
            "scales": of_groups,
        }

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        size, groups = groups_of(in_features, self.group_size)
        # Nibbles of four rows follow each other in steps of 64 inputs. Of 32 inputs, (a, b, c) of [4, 4, 2] is at
        # (b, c, a): pairs are dealt out to four words, and in a word first all even ones, then all odd ones.
        nibbles = unpack(tensors["qweight"], _BITS).view(out_features // 4, in_features // 64, 4, 2, 4, 2, 4)
        codes = nibbles.permute(0, 2, 1, 3, 6, 4, 5).reshape(out_features, in_features)
        scales = checked_scales("scales", tensors["scales"][:groups])
        minimums = checked_scales("qzeros", tensors["qzeros"][:groups]).to(scales.dtype)
        return GroupedWeight(codes, _BITS, size, scales.t().contiguous(), offsets=minimums.t().contiguous())


_FORMATS: dict[str, type[GemmFormat | GemvFormat | GemvFastFormat]] = {
    "gemm": GemmFormat,
    "gemv": GemvFormat,
    "gemv_fast": GemvFastFormat,
}


def _unpack_columns(words: Tensor) -> Tensor:
    """words int32 [R, C] -> uint8 [8 * C, R]"""
    rows, num_words = words.shape
    packed = bytes_of(words).t().contiguous().view(num_words, 4, rows)
    codes = packed.new_empty(num_words, _PER_WORD, rows)
    for byte in range(4):
        low, high = _COLUMN_OF_NIBBLE[2 * byte : 2 * byte + 2]
        torch.bitwise_and(packed[:, byte], 15, out=codes[:, low])
        torch.bitwise_right_shift(packed[:, byte], 4, out=codes[:, high])
    return codes.flatten(0, 1)


def _padded_words(in_features: int, group_size: int) -> int:
    """Words of eight zero points that "gemv" and "gemv_fast" keep for an output."""
    size, groups = groups_of(in_features, group_size)
    if in_features % size or (size < 128 and size not in (32, 64)):
        raise ModelLoadError(
            f"group size {size} does not fit {in_features} inputs in AWQ versions gemv and gemv_fast, expected 32, 64 "
            "or from 128 on and a divisor; quantize the model again with version gemm"
        )
    step = 128 // min(size, 128)
    num_words = -(-groups // _PER_WORD)
    return -(-num_words // step) * step
