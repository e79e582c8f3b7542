"""The layout of grouped weights for the Triton kernels.

codes    int16 [tiles of TILE_N outputs, tiles of inputs, TILE_N, width]: tiles are contiguous, a program streams them.
         An element holds `planes` codes (4 of 4 bits or 2 of 8): element k of a row has those of inputs k,
         width + k, 2 * width + k, ... of the tile, from the low bits up. So does every plane, taken out with one mask
         from two neighbouring elements at a time, come as a matrix of 16-bit elements: just what a tensor core takes.
scales   [G, N], or with zero points per group [G, N, 2]: a scale and its zero point side by side, one 32-bit word in
         float16. float16 as in the checkpoint; float32 if it has float32 or scales of scales.
offsets  [G, N], dtype of scales: minimums

Outputs are padded to TILE_N, inputs to whole tiles, and groups to those of whole tiles: with zeros. Codes of 2 and 3
bits are kept as 4 bits, those of 5 and 6 as 8. A codebook of integers, or of halves of integers (MXFP4's), becomes
8-bit codes with zero point 128.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.quantized.packed import TILES, PackedGrouped
from pagewire.kernels.quantized.weights import GroupedWeight

TILE_N = TILES["cuda"]


def tile_width(group_size: int) -> int:
    """Elements of a tile's row: a plane of them is a step of a product on tensor cores, and is of one group."""
    return 16 if group_size == 16 else 32


def tile_inputs(bits: int, group_size: int) -> int:
    """Inputs of a tile. bits: 4 or 8."""
    return tile_width(group_size) * (16 // bits)


def groups_fit(bits: int, group_size: int, num_inputs: int) -> bool:
    """Returns whether no plane of a tile has inputs of two groups, as all but dequantization needs."""
    inputs = tile_inputs(bits, group_size)
    if group_size >= num_inputs or group_size % inputs == 0:
        return True
    return inputs % group_size == 0 and group_size % tile_width(group_size) == 0


def pack(weight: GroupedWeight) -> PackedGrouped:
    weight = _without_integer_codebook(weight)
    bits = 4 if weight.bits <= 4 else 8
    num_groups = _padded_groups(weight.shape[1], bits, weight.group_size)
    dtype = weight.scales.dtype if weight.super_scales is None else torch.float32
    dtype = torch.float16 if dtype is torch.float16 else torch.float32
    scales, minimums = _pad_groups(weight.flat_scales(), num_groups).to(dtype), weight.flat_minimums()
    if minimums is None and weight.offsets is not None:
        scales = torch.stack([scales, _pad_groups(weight.offsets, num_groups).to(dtype)], dim=-1)
    codebook = weight.codebook
    if codebook is not None:
        codebook = F.pad(codebook, (0, 2**bits - codebook.numel()))
    return PackedGrouped(
        "cuda",
        weight.shape,
        bits,
        weight.group_size,
        weight.zero_point,
        _pack_codes(weight.codes, bits, weight.group_size),
        scales,
        None if minimums is None else _pad_groups(minimums, num_groups).to(dtype),
        codebook,
        weight.permutation,
    )


def unpack(packed: PackedGrouped) -> GroupedWeight:
    num_outputs, num_inputs = packed.shape
    mask = 2**packed.bits - 1
    planes = [(packed.codes >> shift) & mask for shift in range(0, 16, packed.bits)]
    tiles_n, tiles_k, rows, width = packed.codes.shape
    codes = torch.stack(planes, dim=3).to(torch.uint8).transpose(1, 2)  # [tiles_n, rows, tiles_k, planes, width]
    codes = codes.reshape(tiles_n * rows, tiles_k * len(planes) * width)[:num_outputs, :num_inputs].contiguous()
    num_groups = -(-num_inputs // packed.group_size)

    def groups(padded: Tensor) -> Tensor:
        return padded[:num_groups, :num_outputs].T.contiguous()

    offsets = None if packed.offsets is None else groups(packed.offsets)
    if packed.scales.dim() == 3:
        offsets = groups(packed.scales[..., 1]).to(torch.uint8)
    scales = groups(packed.scales[..., 0] if packed.scales.dim() == 3 else packed.scales)
    return GroupedWeight(
        codes,
        packed.bits,
        packed.group_size,
        scales,
        None,
        offsets,
        None,
        packed.zero_point,
        packed.codebook,
        packed.permutation,
    )


def _without_integer_codebook(weight: GroupedWeight) -> GroupedWeight:
    """Or, where scales are fp32 and half of one is exact, without a codebook of halves of integers."""
    codebook, scales = weight.codebook, weight.scales
    if codebook is not None and scales.dtype is torch.float32 and not _has_integers(codebook):
        codebook, scales = 2 * codebook, scales / 2
    if codebook is None or not _has_integers(codebook):
        return weight
    codes = (codebook + 128).to(torch.uint8)[weight.codes.int()]
    return GroupedWeight(
        codes, 8, weight.group_size, scales, weight.super_scales, zero_point=128, permutation=weight.permutation
    )


def _has_integers(codebook: Tensor) -> bool:
    return bool(((codebook == codebook.round()) & (codebook >= -128) & (codebook < 128)).all())


def _pack_codes(codes: Tensor, bits: int, group_size: int) -> Tensor:
    num_outputs, num_inputs = codes.shape
    inputs, width = tile_inputs(bits, group_size), tile_width(group_size)
    codes = F.pad(codes, (0, -num_inputs % inputs, 0, -num_outputs % TILE_N))
    tiles = codes.view(-1, TILE_N, codes.shape[1] // inputs, inputs // width, width).transpose(1, 2)
    packed = torch.zeros(*tiles.shape[:3], width, dtype=torch.int16, device=codes.device)
    for plane in range(tiles.shape[3]):
        packed |= tiles[:, :, :, plane].to(torch.int16) << (bits * plane)
    return packed


def _padded_groups(num_inputs: int, bits: int, group_size: int) -> int:
    """How many groups whole tiles have."""
    if group_size >= num_inputs:
        return 1
    inputs = tile_inputs(bits, group_size)
    return -(-(-(-num_inputs // inputs) * inputs) // group_size)


def _pad_groups(values: Tensor, num_groups: int) -> Tensor:
    """[N, G] -> [num_groups, N padded]"""
    num_outputs = values.shape[0]
    return F.pad(values.T, (0, -num_outputs % TILE_N, 0, num_groups - values.shape[1])).contiguous()
