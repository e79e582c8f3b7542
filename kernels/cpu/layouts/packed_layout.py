"""Dense bf16 weights as the CPU's kernels read them (packed_linear.h), packed and unpacked.

bfloat16 [tiles, units, 16, 32]: outputs are padded to tiles of 16, inputs to units of 32, with zeros. Row r of a unit
has inputs 2 r and 2 r + 1 of the tile's first output, then of its second, and so on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 16  # outputs
UNIT = 32  # inputs
ROWS = UNIT // 2  # of a unit


def packed_shape(out_features: int, in_features: int) -> tuple[int, int, int, int]:
    return -(-out_features // TILE), -(-in_features // UNIT), ROWS, 2 * TILE


def pack(weight: Tensor) -> Tensor:
    """Packs a weight bfloat16 [N, K] into new memory."""
    out_features, in_features = weight.shape
    padded = F.pad(weight, (0, -in_features % UNIT, 0, -out_features % TILE)).contiguous()
    pairs = padded.view(torch.int32).view(-1, TILE, padded.shape[1] // UNIT, ROWS)
    result = torch.empty(packed_shape(out_features, in_features), dtype=weight.dtype)
    result.view(torch.int32).copy_(pairs.permute(0, 2, 3, 1))
    return result


def unpack(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The weight [N, K] that was packed"""
    pairs = packed.view(torch.int32).permute(0, 3, 1, 2).contiguous()
    return pairs.view(packed.dtype).view(packed.shape[0] * TILE, -1)[:out_features, :in_features].contiguous()
