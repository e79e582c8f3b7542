"""Grouped weights as the CPU's kernels read them (grouped.h), packed and unpacked.

Outputs are padded to tiles of 16; each group of inputs to 16, or to a multiple of 32; all inputs to units of 32.

codes    uint8 [tiles, units, bits, 64]: per unit planes of 64 bytes: byte 4 n + i of a plane belongs to output n of
         the tile and to input 4 q + i of the unit. 4 low bits: plane p holds the quads q = 2p and 2p + 1 in its low
         and high nibbles; 2 bits: four quads to a plane; 1 bit: eight. 3 bits are 2 + 1, 5 are 4 + 1, 6 are 4 + 2 (low
         bits first); 8 are a plane per quad
scales   float16 or float32 [tiles, G, 16]; or int8 [tiles, S, 16 * (2 + 256 / group_size)], two levels: for each 256
         inputs 16 super scales as float16, then 16 bytes per group
offsets  None; uint8 [tiles, G, 16], zero points; float16 or float32 [tiles, G, 16], minimums; or int8, two levels of
         minimums (the lower one unsigned)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.quantized.packed import TILES, PackedGrouped
from pagewire.kernels.quantized.weights import E4M3, SUPER_SIZE, GroupedWeight

TILE = TILES["cpu"]  # outputs
UNIT = 32  # inputs
QUADS = UNIT // 4

# Codes that are packed at a time: packing needs several times their size in temporary memory.
_CHUNK_CODES = 4_000_000

# bits -> (width of a field, lowest bit of the code in it) of each kind of plane
_PLANES = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),), 5: ((4, 0), (1, 4)), 6: ((4, 0), (2, 4)), 8: ((8, 0),)}

_E4M3_BITS = E4M3.view(torch.int32)


@dataclass(frozen=True)
class Shape:
    """The tiles, units and groups of a weight of N outputs and K inputs."""

    num_outputs: int
    num_inputs: int
    group_size: int

    @property
    def tiles(self) -> int:
        return -(-self.num_outputs // TILE)

    @property
    def groups(self) -> int:
        return -(-self.num_inputs // self.group_size)

    @property
    def padded_group(self) -> int:
        return UNIT // 2 if self.group_size <= UNIT // 2 else -(-self.group_size // UNIT) * UNIT

    @property
    def units(self) -> int:
        return -(-self.groups * self.padded_group // UNIT)

    def codes_shape(self, bits: int) -> tuple[int, int, int, int]:
        return (self.tiles, self.units, bits, 2 * UNIT)


def shape_of(num_outputs: int, num_inputs: int, group_size: int) -> Shape:
    return Shape(num_outputs, num_inputs, min(group_size, num_inputs))


def pack(weight: GroupedWeight) -> PackedGrouped:
    # Compares bits, as two of the numbers are NaN.
    if weight.bits == 8 and weight.codebook is not None and not weight.codebook.view(torch.int32).equal(_E4M3_BITS):
        raise ValueError("the CPU's kernels take no codebook of 8 bits other than E4M3")
    if weight.codebook is not None and weight.bits == 8:
        weight = _with_nan_in_scales(weight)
    num_outputs, num_inputs = weight.shape
    shape = shape_of(num_outputs, num_inputs, weight.group_size)
    codes = torch.empty(shape.codes_shape(weight.bits), dtype=torch.uint8)
    step = max(1, _CHUNK_CODES // (shape.units * UNIT * TILE))
    for tile in range(0, shape.tiles, step):
        rows = weight.codes[tile * TILE : (tile + step) * TILE]
        codes[tile : tile + step] = _pack_codes(rows, shape, weight.bits)
    return PackedGrouped(
        "cpu",
        weight.shape,
        weight.bits,
        shape.group_size,
        weight.zero_point,
        codes,
        _pack_groups(weight.scales, weight.super_scales, shape),
        None if weight.offsets is None else _pack_groups(weight.offsets, weight.super_offsets, shape),
        weight.codebook,
        None if weight.permutation is None else weight.permutation.int(),
    )


def _with_nan_in_scales(weight: GroupedWeight) -> GroupedWeight:
    """Returns a weight that kernels convert faster: all e4m3 numbers are finite; a NaN moves to its group's scale."""
    codes = weight.codes
    if codes.numel() == 0 or (codes.max() < 0xFF and codes.view(torch.int8).max() < 0x7F):
        return weight  # without a copy of the codes
    groups = F.pad(codes & 0x7F, (0, -codes.shape[1] % weight.group_size)).unflatten(1, (-1, weight.group_size))
    has_nan = (groups == 0x7F).any(dim=2)
    return replace(weight, scales=weight.scales.masked_fill(has_nan, float("nan")))


def unpack(packed: PackedGrouped) -> GroupedWeight:
    shape = shape_of(*packed.shape, packed.group_size)
    scales, super_scales = _unpack_groups(packed.scales, shape)
    offsets, super_offsets = (None, None) if packed.offsets is None else _unpack_groups(packed.offsets, shape)
    if offsets is not None and super_offsets is not None:
        offsets = offsets.view(torch.uint8)
    return GroupedWeight(
        _unpack_codes(packed.codes, shape, packed.bits),
        packed.bits,
        packed.group_size,
        scales,
        super_scales,
        offsets,
        super_offsets,
        packed.zero_point,
        packed.codebook,
        packed.permutation,
    )


def _pack_codes(codes: Tensor, shape: Shape, bits: int) -> Tensor:
    """codes uint8 [rows, K] -> uint8 [tiles, units, bits, 64]"""
    rows = F.pad(codes, (0, shape.groups * shape.group_size - shape.num_inputs, 0, -codes.shape[0] % TILE))
    if shape.group_size % UNIT:
        groups = rows.unflatten(1, (shape.groups, shape.group_size))
        rows = F.pad(groups, (0, shape.padded_group - shape.group_size)).flatten(1)
        rows = F.pad(rows, (0, shape.units * UNIT - rows.shape[1]))
    quads = rows.contiguous().view(torch.int32).view(-1, TILE, shape.units, QUADS).permute(0, 2, 3, 1)
    planes = quads.contiguous().view(torch.uint8)  # [tiles, units, quads, 64]
    return torch.cat([_join(planes, width, low) for width, low in _PLANES[bits]], dim=2)


def _join(planes: Tensor, width: int, low: int) -> Tensor:
    """Bits [low, low + width) of neighbouring planes, side by side."""
    if width == 8:
        return planes
    fields = (planes >> low & ((1 << width) - 1)).unflatten(2, (-1, 8 // width))
    joined = fields[:, :, :, 0].clone()
    for index in range(1, 8 // width):
        joined |= fields[:, :, :, index] << (width * index)
    return joined


def _unpack_codes(codes: Tensor, shape: Shape, bits: int) -> Tensor:
    """The inverse of `_pack_codes`: uint8 [N, K]"""
    first, planes = 0, torch.zeros((*codes.shape[:2], QUADS, 2 * UNIT), dtype=torch.uint8)
    for width, low in _PLANES[bits]:
        count = QUADS * width // 8
        fields = codes[:, :, first : first + count]
        shifted = torch.stack([fields >> width * i & ((1 << width) - 1) for i in range(8 // width)], dim=3)
        planes |= shifted.flatten(2, 3) << low
        first += count
    rows = planes.view(torch.int32).permute(0, 3, 1, 2).contiguous().view(torch.uint8).view(shape.tiles * TILE, -1)
    groups = rows[:, : shape.groups * shape.padded_group].unflatten(1, (shape.groups, shape.padded_group))
    flat = groups[:, :, : shape.group_size].flatten(1)
    return flat[: shape.num_outputs, : shape.num_inputs].contiguous()


def _pack_groups(groups: Tensor, supers: Tensor | None, shape: Shape) -> Tensor:
    """[N, G] and perhaps [N, S] -> a tensor of scales or offsets"""
    if supers is None:
        return _tiles(groups)
    num_supers = supers.shape[1]
    padding = num_supers * (SUPER_SIZE // shape.group_size) - shape.groups
    levels = F.pad(_tiles(groups.view(torch.int8)), (0, 0, 0, padding))
    return torch.cat([_tiles(supers).view(torch.int8), levels.view(shape.tiles, num_supers, -1)], dim=2)


def _unpack_groups(packed: Tensor, shape: Shape) -> tuple[Tensor, Tensor | None]:
    """[N, G], and [N, S] where there are two levels"""
    if packed.dtype is not torch.int8:
        return _rows(packed, shape.num_outputs), None
    supers = packed[:, :, : 2 * TILE].contiguous().view(torch.float16)
    levels = packed[:, :, 2 * TILE :].reshape(shape.tiles, -1, TILE)[:, : shape.groups]
    return _rows(levels, shape.num_outputs), _rows(supers, shape.num_outputs)


def _tiles(rows: Tensor) -> Tensor:
    """[N, G] -> [tiles, G, 16]"""
    return F.pad(rows, (0, 0, 0, -rows.shape[0] % TILE)).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def _rows(tiles: Tensor, num_rows: int) -> Tensor:
    """The inverse of `_tiles`."""
    return tiles.transpose(1, 2).flatten(0, 1)[:num_rows].contiguous()


def dequantize(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    permutation: Tensor | None,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    zero_point: int,
) -> Tensor:
    """Returns float32 [N, K] of a packed weight's tensors"""
    packed = PackedGrouped("cpu", shape, bits, group_size, zero_point, codes, scales, offsets, codebook, permutation)
    return unpack(packed).dequantize()
