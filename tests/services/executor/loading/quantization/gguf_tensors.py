"""Random tensors in every GGUF type, by the structs alone: no quantizer takes part."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Type -> bytes of a block at which float16 scales and minimums begin; all other bytes may have any value.
HALVES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.MXFP4: (),  # an exponent, in one byte
}

# What is subtracted (in K-quants) or added, in units of the scale, to centre the codes.
_MIDDLES = {Type.Q4_1: -7.5, Type.Q5_1: -15.5, Type.Q2_K: 1.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}


def random_blocks(type_: Type, num_rows: int, blocks_per_row: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [num_rows, bytes per row]; scales are any finite numbers, among them negative and subnormal ones."""
    blocks = rng.integers(0, 256, (num_rows * blocks_per_row, gguf.GGML_QUANT_SIZES[type_][1]), dtype=np.uint8)
    for start in HALVES[type_]:
        high = blocks[:, start + 1]
        high[high & 0x7C == 0x7C] &= 0xBF  # would be inf or NaN
    if type_ is Type.MXFP4:
        blocks[:, 0] %= 255  # which is no number
    return blocks.reshape(num_rows, -1)


def random_weight(type_: Type, num_rows: int, num_inputs: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """Returns random blocks (or F16, BF16) with scales that give weights of about this standard deviation."""
    if not HALVES.get(type_):
        return gguf.quantize(rng.normal(0, std, (num_rows, num_inputs)).astype(np.float32), type_)
    block_codes, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = random_blocks(type_, num_rows, num_inputs // block_codes, rng).reshape(-1, block_bytes)
    levels = [rng.uniform(0.5, 1.5, len(blocks)) for _ in HALVES[type_]]
    if len(levels) == 2:  # scales times codes, and what centres them
        levels[1] = levels[0] * _MIDDLES[type_]
    _write(blocks, type_, levels, 1.0)
    _write(blocks, type_, levels, std / gguf.dequantize(blocks, type_).std())
    return blocks.reshape(num_rows, -1)


def _write(blocks: np.ndarray, type_: Type, levels: Sequence[np.ndarray], factor: float) -> None:
    for start, values in zip(HALVES[type_], levels, strict=True):
        blocks[:, start : start + 2] = (values * factor).astype("<f2").view(np.uint8).reshape(-1, 2)
