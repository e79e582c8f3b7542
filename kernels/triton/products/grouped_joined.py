"""The product of a tile with grouped weights for few rows: codes stay exact, and sums are scaled.

Where warp groups multiply and a tile of inputs is of one group, its planes are one product. Else each plane is one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pagewire.kernels.triton.common.warp_groups import multiplies_by_warp_groups
from pagewire.kernels.triton.products.grouped_layout import TILE_N
from pagewire.kernels.triton.products.grouped_tile import (
    MINIMUMS,
    ZEROS,
    group_of_tile,
    join_planes,
    multiply_normed_tiles,
    plane_numbers,
)

_TILE_N = tl.constexpr(TILE_N)


@triton.jit
def multiply_tiles(
    x_rows,  # pointers [1, BLOCK_M] to the rows of x
    in_rows,  # bool [1, BLOCK_M]
    codes_ptr,
    scales_ptr,  # fp16 or fp32; int32 words of an fp16 scale and an fp16 zero point; or pairs of fp32
    minimums_ptr,  # as scales, or None
    first_output,  # int32, a multiple of BLOCK_N or of the layout's tile
    source,  # int32 [BLOCK_N]: outputs from first_output on; those of its last tile may repeat
    num_inputs,
    group_stride,  # outputs, padded
    tiles_k,
    first_tile,
    last_tile,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs; 0 if there is one group
    ZERO_POINT: tl.constexpr,
    FORM: tl.constexpr,
    EVEN_K: tl.constexpr,  # no tile is padded
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    dtype: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """Returns fp32 [BLOCK_N, BLOCK_M]: these outputs of rows of x, over tiles of inputs [first_tile, last_tile)."""
    ONE_GROUP: tl.constexpr = GROUP == 0 or GROUP >= WIDTH * (16 // BITS)  # in a tile
    if ONE_GROUP and multiplies_by_warp_groups(BLOCK_N):
        acc = _multiply_joined_tiles(
            x_rows, in_rows, codes_ptr, scales_ptr, minimums_ptr, first_output, source, num_inputs, group_stride,
            tiles_k, first_tile, last_tile, BITS, GROUP, ZERO_POINT, FORM, EVEN_K, WIDTH, BLOCK_N, BLOCK_M, dtype,
            INLINE_ASM,
        )  # fmt: skip
    else:
        acc, _ = multiply_normed_tiles(
            x_rows, None, None, in_rows, codes_ptr, scales_ptr, minimums_ptr, first_output, source,
            num_inputs, group_stride, tiles_k, first_tile, last_tile, BITS, GROUP, ZERO_POINT, FORM, EVEN_K, WIDTH,
            BLOCK_N, BLOCK_M, dtype, INLINE_ASM,
        )  # fmt: skip
    return acc


@triton.jit
def _multiply_joined_tiles(
    x_rows, in_rows, codes_ptr, scales_ptr, minimums_ptr, first_output, source, num_inputs, group_stride, tiles_k,
    first_tile, last_tile, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO_POINT: tl.constexpr, FORM: tl.constexpr,
    EVEN_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, dtype: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):  # fmt: skip
    """Computes `multiply_tiles` by one product for each tile, which is of one group: to read its sums, a warp group
    waits until its product is done, and so once a tile instead of once for each plane."""
    PLANES: tl.constexpr = 16 // BITS
    TILE_K: tl.constexpr = WIDTH * PLANES
    WORDS: tl.constexpr = scales_ptr.dtype.element_ty == tl.int32
    PAIRS: tl.constexpr = FORM == ZEROS and not WORDS
    element = tl.arange(0, WIDTH)
    column = tl.arange(0, TILE_K)
    rows_there = source - first_output // _TILE_N * _TILE_N
    row_offsets = rows_there // _TILE_N * (tiles_k * _TILE_N * WIDTH) + rows_there % _TILE_N * WIDTH
    first_code = first_output.to(tl.int64) // _TILE_N * tiles_k + first_tile
    codes_ptrs = codes_ptr + first_code * (_TILE_N * WIDTH) + row_offsets[:, None] + element[None, :]
    x_ptrs = x_rows + first_tile * TILE_K + column[:, None]
    scale_ptrs = scales_ptr + (2 * source if PAIRS else source)
    scale_stride = 2 * group_stride if PAIRS else group_stride
    zero_point = tl.full([1, 1], ZERO_POINT, dtype=tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    sums = acc
    ones = tl.full([BLOCK_N, TILE_K], 1.0, dtype=tl.float32).to(dtype)
    for tile in tl.range(first_tile, last_tile):
        codes = tl.load(codes_ptrs)
        in_x = in_rows
        if not EVEN_K:
            in_x = in_rows & (tile * TILE_K + column < num_inputs)[:, None]
        x = tl.load(x_ptrs, mask=in_x, other=0.0)
        group = group_of_tile(tile, TILE_K, GROUP)
        if WORDS:
            word = tl.load(scales_ptr + group * group_stride + source)
            scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
            zero = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)[:, None]
        else:
            scale = tl.load(scale_ptrs + group * scale_stride)
            zero = tl.load(scale_ptrs + group * scale_stride + 1)[:, None] if PAIRS else zero_point
        first = plane_numbers(codes, zero, 0, BITS, dtype, INLINE_ASM)
        second = plane_numbers(codes, zero, 1, BITS, dtype, INLINE_ASM)
        third = first
        fourth = second
        if PLANES == 4:
            third = plane_numbers(codes, zero, 2, BITS, dtype, INLINE_ASM)
            fourth = plane_numbers(codes, zero, 3, BITS, dtype, INLINE_ASM)
        numbers = join_planes(first, second, third, fourth, PLANES)
        if GROUP > 0:
            acc += scale.to(tl.float32)[:, None] * tl.dot(numbers, x)
            if FORM == MINIMUMS:
                minimum = tl.load(minimums_ptr + group * group_stride + source)
                acc += minimum.to(tl.float32)[:, None] * tl.dot(ones, x)
        else:  # scaled once, behind the loop
            acc = tl.dot(numbers, x, acc)
            if FORM == MINIMUMS:
                sums = tl.dot(ones, x, sums)
        codes_ptrs += _TILE_N * WIDTH
        x_ptrs += TILE_K
    if GROUP == 0:
        scale = tl.load(scale_ptrs)
        if WORDS:
            scale = (scale & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        acc *= scale.to(tl.float32)[:, None]
        if FORM == MINIMUMS:
            acc += tl.load(minimums_ptr + source).to(tl.float32)[:, None] * sums
    return acc
