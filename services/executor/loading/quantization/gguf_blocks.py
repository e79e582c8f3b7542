"""GGUF's blocks of quantized weights as codes, scales and offsets.

A row is a run of blocks; a block holds its scales, and its codes in an order that suits llama.cpp's kernels.
Layouts: the structs `block_q4_0`, ... of
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h, and `dequantize_row_*` of ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.services.executor.loading.quantization.mxfp4 import E2M1

__all__ = ["FORMS", "Form", "decode"]

_CHUNK_CODES = 1 << 18  # decoded at a time: temporaries stay in the core's cache

# The values of the codes of IQ4_NL and IQ4_XS.
_IQ4_VALUES = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)).float()


@dataclass(frozen=True)
class Form:
    """The common properties of all blocks of a type; see `GroupedWeight`.

    read: uint8 [B, bytes per block] -> the tensors of a GroupedWeight by name, each [B, numbers per block]
    """

    read: Callable[[Tensor], dict[str, Tensor]]
    bits: int
    group_size: int
    zero_point: int = 0
    codebook: Tensor | None = None


def decode(blocks: Tensor, type_: Type) -> GroupedWeight:
    """Unpacks blocks: uint8 [N, bytes per row], rows of blocks of a type in FORMS.

    The weight dequantizes to the values of ggml's own decoder, bit by bit. Values are not checked: a scale may be inf.
    """
    form = FORMS[type_]
    block_codes, block_bytes = GGML_QUANT_SIZES[type_]
    num_rows, row_bytes = blocks.shape
    blocks_per_row = row_bytes // block_bytes
    rows_per_chunk = max(1, _CHUNK_CODES // (blocks_per_row * block_codes))
    tensors: dict[str, Tensor] = {}
    for start in range(0, num_rows, rows_per_chunk):
        chunk = blocks[start : start + rows_per_chunk]
        for name, part in form.read(chunk.reshape(-1, block_bytes)).items():
            if name not in tensors:
                tensors[name] = part.new_empty(num_rows, blocks_per_row * part.shape[1])
            tensors[name][start : start + len(chunk)] = part.reshape(len(chunk), -1)
    return GroupedWeight(
        bits=form.bits, group_size=form.group_size, zero_point=form.zero_point, codebook=form.codebook, **tensors
    )


def _q4_0(blocks: Tensor) -> dict[str, Tensor]:
    scales, codes = blocks.split((2, 16), dim=1)
    return {"scales": _float16(scales), "codes": _unpack(codes, 4)}


def _q4_1(blocks: Tensor) -> dict[str, Tensor]:
    scales, minimums, codes = blocks.split((2, 2, 16), dim=1)
    return {"scales": _float16(scales), "offsets": _float16(minimums), "codes": _unpack(codes, 4)}


def _q5_0(blocks: Tensor) -> dict[str, Tensor]:
    scales, high, low = blocks.split((2, 4, 16), dim=1)
    return {"scales": _float16(scales), "codes": _unpack(low, 4) | (_unpack(high, 1, run=1) << 4)}


def _q5_1(blocks: Tensor) -> dict[str, Tensor]:
    scales, minimums, high, low = blocks.split((2, 2, 4, 16), dim=1)
    codes = _unpack(low, 4) | (_unpack(high, 1, run=1) << 4)
    return {"scales": _float16(scales), "offsets": _float16(minimums), "codes": codes}


def _q8_0(blocks: Tensor) -> dict[str, Tensor]:
    scales, codes = blocks.split((2, 32), dim=1)
    return {"scales": _float16(scales), "codes": codes ^ 0x80}  # int8 + 128


def _q2_k(blocks: Tensor) -> dict[str, Tensor]:
    scales, codes, super_scales, super_minimums = blocks.split((16, 64, 2, 2), dim=1)
    return {
        "scales": (scales & 0xF).view(torch.int8),
        "super_scales": _float16(super_scales),
        "offsets": scales >> 4,
        "super_offsets": -_float16(super_minimums),
        "codes": _unpack(codes, 2, run=32),
    }


def _q3_k(blocks: Tensor) -> dict[str, Tensor]:
    high, low, low_scales, high_scales, super_scales = blocks.split((32, 64, 8, 4, 2), dim=1)
    scales = _unpack(low_scales, 4) | (_unpack(high_scales, 2) << 4)
    return {
        "scales": scales.view(torch.int8) - 32,
        "super_scales": _float16(super_scales),
        "codes": _unpack(low, 2, run=32) | (_unpack(high, 1) << 2),
    }


def _q4_k(blocks: Tensor) -> dict[str, Tensor]:
    supers, scales, codes = blocks.split((4, 12, 128), dim=1)
    return _scales_and_minimums(supers, scales) | {"codes": _unpack(codes, 4, run=32)}


def _q5_k(blocks: Tensor) -> dict[str, Tensor]:
    supers, scales, high, low = blocks.split((4, 12, 32, 128), dim=1)
    return _scales_and_minimums(supers, scales) | {"codes": _unpack(low, 4, run=32) | (_unpack(high, 1) << 4)}


def _q6_k(blocks: Tensor) -> dict[str, Tensor]:
    low, high, scales, super_scales = blocks.split((128, 64, 16, 2), dim=1)
    return {
        "scales": scales.view(torch.int8),
        "super_scales": _float16(super_scales),
        "codes": _unpack(low, 4, run=64) | (_unpack(high, 2, run=32) << 4),
    }


def _iq4_xs(blocks: Tensor) -> dict[str, Tensor]:
    super_scales, high_scales, low_scales, codes = blocks.split((2, 2, 4, 128), dim=1)
    scales = _unpack(low_scales, 4, run=1) | (_unpack(high_scales, 2, run=1) << 4)
    return {
        "scales": scales.view(torch.int8) - 32,
        "super_scales": _float16(super_scales),
        "codes": _unpack(codes, 4, run=16),
    }


def _mxfp4(blocks: Tensor) -> dict[str, Tensor]:
    exponents, codes = blocks.split((1, 16), dim=1)
    return {"scales": torch.exp2(exponents.float() - 127), "codes": _unpack(codes, 4)}


# Where w = scale * code - minimum in GGUF, GroupedWeight adds: minimums change their sign.
FORMS = {
    Type.Q4_0: Form(_q4_0, bits=4, group_size=32, zero_point=8),
    Type.Q4_1: Form(_q4_1, bits=4, group_size=32),
    Type.Q5_0: Form(_q5_0, bits=5, group_size=32, zero_point=16),
    Type.Q5_1: Form(_q5_1, bits=5, group_size=32),
    Type.Q8_0: Form(_q8_0, bits=8, group_size=32, zero_point=128),
    Type.Q2_K: Form(_q2_k, bits=2, group_size=16),
    Type.Q3_K: Form(_q3_k, bits=3, group_size=16, zero_point=4),
    Type.Q4_K: Form(_q4_k, bits=4, group_size=32),
    Type.Q5_K: Form(_q5_k, bits=5, group_size=32),
    Type.Q6_K: Form(_q6_k, bits=6, group_size=16, zero_point=32),
    Type.IQ4_NL: Form(_q4_0, bits=4, group_size=32, codebook=_IQ4_VALUES),
    Type.IQ4_XS: Form(_iq4_xs, bits=4, group_size=32, codebook=_IQ4_VALUES),
    Type.MXFP4: Form(_mxfp4, bits=4, group_size=32, codebook=E2M1 + 0.0),  # ggml knows no -0
}


def _scales_and_minimums(supers: Tensor, packed: Tensor) -> dict[str, Tensor]:
    """Of Q4_K and Q5_K: 8 scales and 8 minimums of 6 bits each.

    The first four of each have a byte of their own; its two high bits belong to the last four; their low four bits
    share the last 4 bytes, scales in the low halves.
    """
    scales, minimums, last = packed.split((4, 4, 4), dim=1)
    return {
        "scales": torch.cat((scales & 0x3F, (last & 0xF) | ((scales >> 2) & 0x30)), dim=1).view(torch.int8),
        "super_scales": _float16(supers[:, :2]),
        "offsets": torch.cat((minimums & 0x3F, (last >> 4) | ((minimums >> 2) & 0x30)), dim=1),
        "super_offsets": -_float16(supers[:, 2:]),
    }


def _unpack(packed: Tensor, bits: int, run: int | None = None) -> Tensor:
    """uint8 [B, n] -> [B, n * 8 / bits]: the lowest bits of `run` bytes (all of a block's, if None), then the next
    bits of these bytes, ...; then the next `run` bytes.
    """
    num_blocks, num_bytes = packed.shape
    run = num_bytes if run is None else run
    unpacked = packed.new_empty(num_blocks, num_bytes // run, 8 // bits, run)
    runs = packed.reshape(num_blocks, num_bytes // run, run)
    for i in range(8 // bits):
        torch.bitwise_and(runs >> (bits * i), (1 << bits) - 1, out=unpacked[:, :, i])
    return unpacked.view(num_blocks, -1)


def _float16(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.float16)
