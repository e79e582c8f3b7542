"""The product of a tile with grouped weights for many rows: weights are scaled in registers, and so rounded.

`grouped_joined.multiply_tiles` keeps codes exact and scales sums, at least once a tile: to read sums, a warp group
waits until its product is done, and tensor cores have nothing to do while it makes the next tile's numbers. Here a
tile's product is added to sums that are not read before the last tile. So products stay in flight
while the next tile's weights are made, which is all that many rows need: the arithmetic of making them is less than
that of multiplying them.

A weight is rounded once to x's dtype, as `grouped_dequantize` rounds it (twice where it has a minimum); a scale with
more bits than that is used as the sum of two numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels import tuning
from pagewire.kernels.triton.products.grouped_layout import TILE_N
from pagewire.kernels.triton.products.grouped_tile import (
    MINIMUMS,
    ZEROS,
    group_of_tile,
    join_planes,
    load_groups,
    plane_numbers,
)
from triton.tools.tensor_descriptor import TensorDescriptor

_TILE_N = tl.constexpr(TILE_N)


def describe_rows(x: Tensor, block_m: int, inputs: int) -> TensorDescriptor | None:
    """Returns a descriptor of x [num_tokens, K] in boxes of block_m rows and so many inputs, which the tensor memory
    accelerator (TMA) of sm_90 copies: one thread asks for a box, where each would compute addresses for its part. None
    where it cannot."""
    if tuning.capability_of(x.device) != 90 or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    if x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16 or x.stride(1) != 1:
        return None
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [block_m, inputs])


def rows_type(dtype: str, block_m: int, inputs: int) -> str:
    """Returns Triton's name of the type of `describe_rows`; dtype: as "bf16"."""
    return f"tensordesc<{dtype}[{block_m},{inputs}]>"


@triton.constexpr_function
def _scaling_asm(half: bool, minimums: bool, two: bool) -> str:
    """PTX: two numbers ($1) times a scale ($2), plus a minimum ($3). two: both come as sums ($2 + $3, $4 + $5)."""
    kind, nothing, one = ("f16x2", "0x80008000", "0x3c003c00") if half else ("bf16x2", "0x80008000", "0x3f803f80")
    fma = f"fma.rn.{kind}"
    if not two:
        return f"{{ .reg .b32 none; mov.b32 none, {nothing}; {fma} $0, $1, $2, {'$3' if minimums else 'none'}; }}"
    if not minimums:
        return f"{{ .reg .b32 none, rest; mov.b32 none, {nothing}; {fma} rest, $1, $3, none; {fma} $0, $1, $2, rest; }}"
    return (
        f"{{ .reg .b32 one, rest, most; mov.b32 one, {one}; {fma} rest, $1, $3, $5; {fma} most, $1, $2, $4; "
        f"{fma} $0, most, one, rest; }}"
    )


@triton.jit
def _two(value, DTYPE: tl.constexpr):
    """A column of fp32 as the sum of two of DTYPE."""
    first = value.to(DTYPE)
    return first, (value - first.to(tl.float32)).to(DTYPE)


@triton.jit
def _scaled(
    numbers,  # [rows, width]
    scale,  # [rows], fp16 or fp32
    minimum,  # as scale; ignored unless MINIMUM
    MINIMUM: tl.constexpr,
    DTYPE: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """numbers * scale + minimum, in DTYPE."""
    HALF: tl.constexpr = DTYPE.is_fp16()
    TWO: tl.constexpr = scale.dtype != DTYPE  # it may have more bits
    scale = scale.to(tl.float32)[:, None]
    minimum = minimum.to(tl.float32)[:, None]
    if not INLINE_ASM:
        weights = numbers.to(tl.float32) * scale
        if MINIMUM:
            weights += minimum
        weights = weights.to(DTYPE)
    elif TWO and MINIMUM:
        scale_first, scale_rest = _two(scale, DTYPE)
        minimum_first, minimum_rest = _two(minimum, DTYPE)
        weights = tl.inline_asm_elementwise(
            _scaling_asm(HALF, MINIMUM, TWO), "=r,r,r,r,r,r",
            [numbers, scale_first, scale_rest, minimum_first, minimum_rest], dtype=numbers.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    elif TWO:
        scale_first, scale_rest = _two(scale, DTYPE)
        weights = tl.inline_asm_elementwise(
            _scaling_asm(HALF, MINIMUM, TWO), "=r,r,r,r", [numbers, scale_first, scale_rest],
            dtype=numbers.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    elif MINIMUM:
        weights = tl.inline_asm_elementwise(
            _scaling_asm(HALF, MINIMUM, TWO), "=r,r,r,r", [numbers, scale.to(DTYPE), minimum.to(DTYPE)],
            dtype=numbers.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        weights = tl.inline_asm_elementwise(
            _scaling_asm(HALF, MINIMUM, TWO), "=r,r,r", [numbers, scale.to(DTYPE)],
            dtype=numbers.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    return weights


@triton.jit
def _plane_weights(
    codes,
    scales,  # of the tile's groups: four, of which the last may repeat the first
    zeros,  # the same of zero points, or of minimums
    PLANE: tl.constexpr,
    GROUPS: tl.constexpr,  # of a tile
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    DTYPE: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """[rows, width] of one plane"""
    GROUP: tl.constexpr = PLANE * GROUPS // (16 // BITS)
    scale = scales[GROUP]
    zero = tl.full([1, 1], ZERO_POINT, dtype=tl.float32)
    if FORM == ZEROS:
        zero = zeros[GROUP][:, None]
    numbers = plane_numbers(codes, zero, PLANE, BITS, DTYPE, INLINE_ASM)
    return _scaled(numbers, scale, zeros[GROUP], FORM == MINIMUMS, DTYPE, INLINE_ASM)


@triton.jit
def _half(word, WHICH: tl.constexpr):
    """fp16 of the lower (0) or upper (1) half of an int32."""
    return (word >> 16 * WHICH & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _load_pairs(pointer, pairs, stride, COUNT: tl.constexpr):
    """As `load_groups`, of scales beside zero points: both. pairs: offsets"""
    if pointer.dtype.element_ty == tl.int32:
        words = load_groups(pointer + pairs, stride, COUNT)
        scales = _half(words[0], 0), _half(words[1], 0), _half(words[2], 0), _half(words[3], 0)
        zeros = _half(words[0], 1), _half(words[1], 1), _half(words[2], 1), _half(words[3], 1)
    else:
        scales = load_groups(pointer + 2 * pairs, 2 * stride, COUNT)
        zeros = load_groups(pointer + 2 * pairs + 1, 2 * stride, COUNT)
    return scales, zeros


@triton.jit
def multiply_wide_tiles(
    x_rows,
    in_rows,
    x_tiles,  # x as `describe_rows` describes it, or None: it is read by addresses
    first_row,  # of x_tiles
    codes_ptr,
    scales_ptr,
    minimums_ptr,
    output,  # int32 [BLOCK_N], of which runs of RUN begin at multiples of it; some may be beyond the last
    num_inputs,
    group_stride,
    tiles_k,
    first_tile,
    last_tile,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    dtype: tl.constexpr,
    INLINE_ASM: tl.constexpr,
    GATED: tl.constexpr,
):
    """Computes `grouped_joined.multiply_tiles`, but that weights are rounded to dtype; blocks end as they may."""
    PLANES: tl.constexpr = 16 // BITS
    TILE_K: tl.constexpr = WIDTH * PLANES
    GROUPS: tl.constexpr = TILE_K // GROUP if GROUP > 0 and GROUP < TILE_K else 1  # of a tile
    element = tl.arange(0, WIDTH)
    column = tl.arange(0, TILE_K)
    # A block may have more outputs than there are, padding included: these read the last tile's. Runs of a tile are
    # told to the compiler, for less than four bytes at a time are not copied to shared memory ahead of their use.
    RUN: tl.constexpr = 8 if GATED else min(_TILE_N, BLOCK_N)
    tile_n = tl.minimum(output // _TILE_N, group_stride // _TILE_N - 1)
    source = tl.max_contiguous(tl.multiple_of(tile_n * _TILE_N + output % _TILE_N, RUN), RUN)
    row_codes = (tile_n.to(tl.int64) * tiles_k + first_tile) * (_TILE_N * WIDTH) + output % _TILE_N * WIDTH
    codes_ptrs = codes_ptr + row_codes[:, None] + element[None, :]
    x_ptrs = x_rows + first_tile * TILE_K + column[:, None]
    # Else sums that no product has touched could leave the loop, too, and ptxas would wait for each product in turn.
    tl.assume(first_tile < last_tile)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for tile in tl.range(first_tile, last_tile):
        codes = tl.load(codes_ptrs)
        if x_tiles is None:
            in_x = in_rows
            if not EVEN_K:
                in_x = in_rows & (tile * TILE_K + column < num_inputs)[:, None]
            x = tl.load(x_ptrs, mask=in_x, other=0.0)
        else:
            x = tl.trans(x_tiles.load([first_row, tile * TILE_K]))  # zeros beyond the last row and input
        group = group_of_tile(tile, TILE_K, GROUP)
        if FORM == ZEROS:
            scales, zeros = _load_pairs(scales_ptr, group * group_stride + source, group_stride, GROUPS)
        else:
            scales = load_groups(scales_ptr + group * group_stride + source, group_stride, GROUPS)
            zeros = scales
            if FORM == MINIMUMS:
                zeros = load_groups(minimums_ptr + group * group_stride + source, group_stride, GROUPS)
        first = _plane_weights(codes, scales, zeros, 0, GROUPS, BITS, FORM, ZERO_POINT, dtype, INLINE_ASM)
        second = _plane_weights(codes, scales, zeros, 1, GROUPS, BITS, FORM, ZERO_POINT, dtype, INLINE_ASM)
        third = first
        fourth = second
        if PLANES == 4:
            third = _plane_weights(codes, scales, zeros, 2, GROUPS, BITS, FORM, ZERO_POINT, dtype, INLINE_ASM)
            fourth = _plane_weights(codes, scales, zeros, 3, GROUPS, BITS, FORM, ZERO_POINT, dtype, INLINE_ASM)
        acc = tl.dot(join_planes(first, second, third, fourth, PLANES), x, acc)
        codes_ptrs += _TILE_N * WIDTH
        x_ptrs += TILE_K
    return acc
