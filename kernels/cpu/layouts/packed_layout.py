"""Dense bf16 weights as the CPU's kernels read them (packed_linear.h), packed and unpacked.

bfloat16 [tiles, units, 16, 32]: outputs are padded to tiles of 16, inputs to units of 32, with zeros. Row r of a unit
has inputs 2 r and 2 r + 1 of the tile's first output, then of its second, and so on.

In fixed point, int16 [tiles, 32 * blocks + 512 * units]: the same with an integer for each number, after the scales of
each block of up to 1,024 inputs and each output, fp32: the value of one integer step. They are powers of two, the
smallest with which the integers of a block fit into 16 bits and their norm does not exceed 46,300: products of two
such blocks fit into 32 bits (fixed_point.h).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 16  # outputs
UNIT = 32  # inputs
ROWS = UNIT // 2  # of a unit
_MOST_BLOCK_UNITS = 32
_LARGEST, _LARGEST_NORM = 2**15 - 1, 46_300.0


def packed_shape(out_features: int, in_features: int) -> tuple[int, int, int, int]:
    return -(-out_features // TILE), -(-in_features // UNIT), ROWS, 2 * TILE


def fixed_point_shape(out_features: int, in_features: int) -> tuple[int, int]:
    tiles, units, rows, pairs = packed_shape(out_features, in_features)
    return tiles, 2 * TILE * -(-units // _block_units(in_features)) + units * rows * pairs


def is_packed(weight: Tensor, out_features: int, in_features: int) -> bool:
    """Returns whether a tensor has the form of such a weight packed in either layout."""
    shapes = {torch.bfloat16: packed_shape, torch.int16: fixed_point_shape}
    shape = shapes.get(weight.dtype)
    return shape is not None and weight.shape == shape(out_features, in_features) and weight.is_contiguous()


def pack(weight: Tensor, *, fixed_point: bool = False) -> Tensor:
    """Packs a weight bfloat16 [N, K] into new memory."""
    if fixed_point:
        return _pack_fixed_point(weight)
    out_features, in_features = weight.shape
    padded = F.pad(weight, (0, -in_features % UNIT, 0, -out_features % TILE)).contiguous()
    pairs = padded.view(torch.int32).view(-1, TILE, padded.shape[1] // UNIT, ROWS)
    result = torch.empty(packed_shape(out_features, in_features), dtype=weight.dtype)
    result.view(torch.int32).copy_(pairs.permute(0, 2, 3, 1))
    return result


def _pack_fixed_point(weight: Tensor) -> Tensor:
    out_features, in_features = weight.shape
    tiles, units, _, _ = packed_shape(out_features, in_features)
    padded = F.pad(weight, (0, -in_features % UNIT, 0, -out_features % TILE)).double()
    blocks = padded.split(_block_units(in_features) * UNIT, dim=1)
    scales = torch.stack([_scales(block) for block in blocks], dim=1)  # [outputs, blocks]
    integers = [(block / scales[:, i : i + 1]).nan_to_num(0).round() for i, block in enumerate(blocks)]
    pairs = torch.cat(integers, dim=1).short().view(torch.int32).view(tiles, TILE, units, ROWS)
    by_block = scales.float().view(tiles, TILE, -1).transpose(1, 2).reshape(tiles, -1)
    parts = [by_block.view(torch.int32), pairs.permute(0, 2, 3, 1).reshape(tiles, -1)]
    return torch.cat(parts, dim=1).view(torch.int16)


def _block_units(in_features: int) -> int:
    units = -(-in_features // UNIT)
    return -(-units // -(-units // _MOST_BLOCK_UNITS))


def _scales(block: Tensor) -> Tensor:
    """block [outputs, inputs], fp64 -> [outputs]"""
    least = torch.maximum(block.abs().amax(1) / _LARGEST, block.norm(dim=1) / _LARGEST_NORM)
    scales = least.log2().ceil().clamp(min=-126).exp2()
    return torch.where(least > 0, scales, 1.0).masked_fill(~least.isfinite(), torch.nan)


def unpack(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """Returns the weight bfloat16 [N, K] that was packed; from fixed point, as it was rounded there."""
    if packed.dtype is torch.int16:
        return _unpack_fixed_point(packed, out_features, in_features)
    pairs = packed.view(torch.int32).permute(0, 3, 1, 2).contiguous()
    return pairs.view(packed.dtype).view(packed.shape[0] * TILE, -1)[:out_features, :in_features].contiguous()


def _unpack_fixed_point(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    units, per_block = packed_shape(out_features, in_features)[1], _block_units(in_features)
    blocks = -(-units // per_block)
    words = packed.view(torch.int32)
    scales = words[:, : blocks * TILE].contiguous().view(torch.float32).view(-1, blocks, TILE)
    rows = words[:, blocks * TILE :].reshape(-1, units * ROWS, TILE).transpose(1, 2).contiguous()
    integers = rows.view(torch.int16).view(-1, units * UNIT)
    parts = [
        (block * scales[:, i].reshape(-1, 1)).bfloat16()
        for i, block in enumerate(integers.split(per_block * UNIT, dim=1))
    ]
    return torch.cat(parts, dim=1)[:out_features, :in_features].contiguous()
