"""Tiles of grouped weights in Triton kernels: from packed codes to numbers.

`grouped_layout.py` says how codes, scales and zero points are laid out. Numbers are made of codes without
conversions from integers, which a GPU does at a fraction of its other rates: a code is put into the low bits of the
mantissa of a power of two, and that power is subtracted, together with the zero point. All of it is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import prefetch
from pagewire.kernels.triton.products.grouped_layout import TILE_N
from pagewire.kernels.triton.products.stream import normed_inputs

_TILE_N = tl.constexpr(TILE_N)

# Tiles of inputs that a program prefetches before it waits, if there are this many.
_PREFETCHED = tl.constexpr(4)

# Forms of a weight
SYMMETRIC = tl.constexpr(0)  # one zero point for all groups
ZEROS = tl.constexpr(1)  # one per group
MINIMUMS = tl.constexpr(2)


@triton.constexpr_function
def _plane_asm(bits: int, plane: int, half: bool) -> str:
    """PTX that takes a plane ($0, two numbers) out of two elements ($1), and what to add to the numbers ($2, ...)."""
    if bits == 8 and not half:
        # bf16 has too few bits for 128 + code: by way of fp32, 2^23 + code. The difference has no more than 8 bits, so
        # that the upper half of it is the bf16 number.
        return (
            "{ .reg .b32 first, second; "
            f"prmt.b32 first, $1, 0x4b000000, {0x7440 + plane:#x}; "
            f"prmt.b32 second, $1, 0x4b000000, {0x7442 + plane:#x}; "
            "add.rn.f32 first, first, $2; add.rn.f32 second, second, $3; prmt.b32 $0, first, second, 0x7632; }"
        )
    if half and bits == 4:
        # 1024 + code, and from the next 4 bits 1024 + 16 * code, which a multiplication by 1/16 (0x2c00) amends in the
        # same instruction that adds: two planes share a shift.
        add = "fma.rn.f16x2 $0, raw, sixteenth, $2;" if plane % 2 else "add.rn.f16x2 $0, raw, $2;"
        shift, mask, one = plane // 2 * 8, "0x00f000f0" if plane % 2 else "0x000f000f", "0x64006400"
    elif half:
        shift, mask, one, add = plane * 8, "0x00ff00ff", "0x64006400", "add.rn.f16x2 $0, raw, $2;"
    else:
        shift, mask, one, add = plane * 4, "0x000f000f", "0x43004300", "fma.rn.bf16x2 $0, raw, unit, $2;"
    return (
        "{ .reg .b32 raw, unit, sixteenth; mov.b32 unit, 0x3f803f80; mov.b32 sixteenth, 0x2c002c00; "
        f"shr.b32 raw, $1, {shift}; lop3.b32 raw, raw, {mask}, {one}, 0xea; {add} }}"
    )


@triton.constexpr_function
def _power_of_two(bits: int, plane: int, half: bool) -> float:
    """What is added, less the zero point, to take away what a code was put into."""
    if half:
        return -64.0 if bits == 4 and plane % 2 else -1024.0
    return -128.0 if bits == 4 else -8388608.0


@triton.jit
def plane_numbers(
    codes,  # int16 [rows, width]
    zero,  # fp32 or fp16 [rows or 1, 1], integers
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,  # fp16 or bf16; without INLINE_ASM any
    INLINE_ASM: tl.constexpr,
):
    """Returns code - zero of one plane, exactly."""
    HALF: tl.constexpr = DTYPE.is_fp16()
    zero = zero.to(tl.float32)
    added = _power_of_two(BITS, PLANE, HALF) - zero
    if not INLINE_ASM:  # what the interpreter knows
        code = (codes.to(tl.int32) >> (BITS * PLANE)) & (2**BITS - 1)
        numbers = (code.to(tl.float32) - zero).to(DTYPE)
    elif HALF:
        numbers = tl.inline_asm_elementwise(
            _plane_asm(BITS, PLANE, HALF), "=r,r,r", [codes, added.to(DTYPE)], dtype=tl.float16, is_pure=True, pack=2
        )
    elif BITS == 8:  # two operands, one for each of two elements
        numbers = tl.inline_asm_elementwise(
            _plane_asm(BITS, PLANE, HALF), "=r,r,r,r", [codes, added], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        numbers = tl.inline_asm_elementwise(
            _plane_asm(BITS, PLANE, HALF), "=r,r,r", [codes, added.to(DTYPE)], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return numbers


@triton.jit
def group_of_tile(tile, TILE_K: tl.constexpr, GROUP: tl.constexpr):
    """The first group of a tile of inputs. GROUP: 0 for a single one."""
    group = tile * 0
    if GROUP >= TILE_K:
        group = tile // (GROUP // TILE_K)
    elif GROUP > 0:
        group = tile * (TILE_K // GROUP)
    return group


@triton.jit
def load_groups(pointers, stride, COUNT: tl.constexpr):
    """The values of COUNT successive groups, and the first one's again up to four."""
    first = tl.load(pointers)
    second = tl.load(pointers + stride) if COUNT > 1 else first
    third = tl.load(pointers + 2 * stride) if COUNT > 2 else first
    fourth = tl.load(pointers + 3 * stride) if COUNT > 2 else first
    return first, second, third, fourth


@triton.jit
def prefetch_tiles(codes_ptr, source, first_tile, tiles_k, WIDTH: tl.constexpr):
    """Prefetches weights while the previous kernel ends and memory is idle. source: int32 [BLOCK_N], outputs."""
    ahead = tl.minimum(first_tile + tl.arange(0, _PREFETCHED), tiles_k - 1)
    row = (source // _TILE_N).to(tl.int64)[:, None] * tiles_k + ahead[None, :]
    prefetch(codes_ptr + row * (_TILE_N * WIDTH) + (source % _TILE_N * WIDTH)[:, None])


@triton.jit
def load_norm(norm_ptr, inputs, num_inputs, WIDTH: tl.constexpr, PLANES: tl.constexpr):
    """A norm's weight for each of a tile's planes, and the first one's again up to four. Beyond the last input, any."""
    last = num_inputs - 1
    first = tl.load(norm_ptr + tl.minimum(inputs, last))
    second = tl.load(norm_ptr + tl.minimum(inputs + WIDTH, last))
    third = tl.load(norm_ptr + tl.minimum(inputs + 2 * WIDTH, last)) if PLANES > 2 else first
    fourth = tl.load(norm_ptr + tl.minimum(inputs + 3 * WIDTH, last)) if PLANES > 2 else first
    return first, second, third, fourth


@triton.jit
def join_planes(first, second, third, fourth, PLANES: tl.constexpr):
    """Returns [rows, PLANES * width] of planes [rows, width], of which the last two are ignored where PLANES is 2. All
    of it stays in the registers where a product wants it."""
    ROWS: tl.constexpr = first.shape[0]
    WIDTH: tl.constexpr = first.shape[1]
    pairs = tl.join(first, second)  # [rows, width, 2]
    if PLANES == 4:
        fours = tl.join(pairs, tl.join(third, fourth))  # [rows, width, 2, 2]
        planes = fours.permute(0, 3, 2, 1).reshape(ROWS, PLANES * WIDTH)
    else:  # not behind a return: the compiler would look at both
        planes = pairs.permute(0, 2, 1).reshape(ROWS, PLANES * WIDTH)
    return planes


@triton.jit
def multiply_normed_tiles(
    x_rows, residual_rows, norm_ptr, in_rows, codes_ptr, scales_ptr, minimums_ptr, first_output,
    source, num_inputs, group_stride, tiles_k, first_tile, last_tile, BITS: tl.constexpr, GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr, FORM: tl.constexpr, EVEN_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, dtype: tl.constexpr, INLINE_ASM: tl.constexpr,
):  # fmt: skip
    """Computes `grouped_joined.multiply_tiles`, and the sums of squares fp32 [BLOCK_M], for the product of a norm that
    is yet to be scaled.

    residual_rows: as x_rows, of what x is added to; norm_ptr: the norm's weight. Or both None: x is multiplied as it
    is. source may lie anywhere behind first_output.
    """
    PLANES: tl.constexpr = 16 // BITS
    TILE_K: tl.constexpr = WIDTH * PLANES
    GROUPS: tl.constexpr = TILE_K // GROUP if GROUP > 0 and GROUP < TILE_K else 1  # of a tile
    WORDS: tl.constexpr = scales_ptr.dtype.element_ty == tl.int32
    PAIRS: tl.constexpr = FORM == ZEROS and not WORDS
    element = tl.arange(0, WIDTH)
    rows_there = source - first_output // _TILE_N * _TILE_N
    row_offsets = rows_there // _TILE_N * (tiles_k * _TILE_N * WIDTH) + rows_there % _TILE_N * WIDTH
    first_code = first_output.to(tl.int64) // _TILE_N * tiles_k + first_tile
    codes_ptrs = codes_ptr + first_code * (_TILE_N * WIDTH) + row_offsets[:, None] + element[None, :]
    x_ptrs = x_rows + first_tile * TILE_K + element[:, None]
    if norm_ptr is not None:
        residual_ptrs = residual_rows + first_tile * TILE_K + element[:, None]
        norm = load_norm(norm_ptr, first_tile * TILE_K + element, num_inputs, WIDTH, PLANES)

    squares = tl.zeros([WIDTH, BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    part = acc
    sums = acc
    ones = tl.full([BLOCK_N, WIDTH], 1.0, dtype=tl.float32).to(dtype)
    zero_point = tl.full([1, 1], ZERO_POINT, dtype=tl.float32)
    scale_ptrs = scales_ptr + (2 * source if PAIRS else source)
    scale_stride = 2 * group_stride if PAIRS else group_stride
    # Scales are loaded a tile ahead. Words need not be: as they belong to an operand, they are prefetched with it.
    group = group_of_tile(first_tile, TILE_K, GROUP)
    if not WORDS:
        scales = load_groups(scale_ptrs + group * scale_stride, scale_stride, GROUPS)
    if FORM == MINIMUMS:
        minimum_ptrs = minimums_ptr + source
        minimums = load_groups(minimum_ptrs + group * group_stride, group_stride, GROUPS)
    for tile in tl.range(first_tile, last_tile):
        codes = tl.load(codes_ptrs)
        codes_ptrs += _TILE_N * WIDTH
        group = group_of_tile(tile, TILE_K, GROUP)
        following = group_of_tile(tl.minimum(tile + 1, tiles_k - 1), TILE_K, GROUP)
        if not WORDS:
            tile_scales = scales
            scales = load_groups(scale_ptrs + following * scale_stride, scale_stride, GROUPS)
        if norm_ptr is not None:
            tile_norm = norm
            norm = load_norm(norm_ptr, (tile + 1) * TILE_K + element, num_inputs, WIDTH, PLANES)
        if FORM == MINIMUMS:
            tile_minimums = minimums
            minimums = load_groups(minimum_ptrs + following * group_stride, group_stride, GROUPS)
        for plane in tl.static_range(PLANES):
            if plane % (PLANES // GROUPS) == 0:  # a group begins
                if WORDS:
                    word = tl.load(scales_ptr + (group + plane * GROUPS // PLANES) * group_stride + source)
                    scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
                    zero = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)[:, None]
                elif PAIRS:
                    scale = tile_scales[plane * GROUPS // PLANES]
                    zero = tl.load(scale_ptrs + (group + plane * GROUPS // PLANES) * scale_stride + 1)[:, None]
                else:
                    scale = tile_scales[plane * GROUPS // PLANES]
                    zero = zero_point
                if GROUP > 0:
                    part = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
                    sums = part
            in_x = in_rows
            if not EVEN_K:
                in_x = in_rows & (tile * TILE_K + plane * WIDTH + element < num_inputs)[:, None]
            x = tl.load(x_ptrs + plane * WIDTH, mask=in_x, other=0.0)
            if norm_ptr is not None:
                residual = tl.load(residual_ptrs + plane * WIDTH, mask=in_x, other=0.0)
                x, squares = normed_inputs(x, residual, tile_norm[plane], squares, dtype)
            part = tl.dot(plane_numbers(codes, zero, plane, BITS, dtype, INLINE_ASM), x, part)
            if FORM == MINIMUMS:
                sums = tl.dot(ones, x, sums)
            if GROUP > 0 and (plane + 1) % (PLANES // GROUPS) == 0:  # it ends
                acc += scale.to(tl.float32)[:, None] * part
                if FORM == MINIMUMS:
                    acc += tile_minimums[plane * GROUPS // PLANES].to(tl.float32)[:, None] * sums
        x_ptrs += TILE_K
        if norm_ptr is not None:
            residual_ptrs += TILE_K
    if GROUP == 0:
        if WORDS:
            scale = (tl.load(scale_ptrs) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            scale = tl.load(scale_ptrs)
        acc = scale.to(tl.float32)[:, None] * part
        if FORM == MINIMUMS:
            acc += tl.load(minimum_ptrs).to(tl.float32)[:, None] * sums
    return acc, tl.sum(squares, axis=0)
