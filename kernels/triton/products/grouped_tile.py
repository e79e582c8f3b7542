"""What the Triton kernels for grouped weights have in common: from packed codes to numbers.

`grouped_layout.py` says how codes, scales and zero points are laid out. Numbers are made of codes without
conversions from integers, which a GPU does at a fraction of its other rates: a code is put into the low bits of the
mantissa of a power of two, and that power is subtracted, together with the zero point. All of it is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    """code - zero of one plane, exactly."""
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
