"""Conversions of float8_e4m3fn, which Triton kernels see as bytes, for kernels that read or write an fp8 KV cache.

Kernels see the cache as uint8, because Triton refuses the fp8 type below compute capability 8.9. NATIVE says whether
the GPU converts by itself; otherwise the same bits are computed with integer arithmetic.

An e4m3 number is s eeee mmm with exponent bias 7: 448 is the largest, 2^-6 the smallest normal one, subnormals are
multiples of 2^-9, 0x7f and 0xff are NaN, and there is no infinity.
"""

from __future__ import annotations

from functools import cache

import torch

import triton
import triton.language as tl


@cache
def has_native_decode(device: torch.device) -> bool:
    """NATIVE of `e4m3_to_fp16`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def has_native_encode(device: torch.device) -> bool:
    """NATIVE of `e4m3_from_fp32`. On 8.9 Triton converts by way of fp16, which rounds twice: not torch's bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def e4m3_from_fp32(x, NATIVE: tl.constexpr):
    """Returns fp32 -> uint8: rounded to nearest even, what lies beyond +-448 (infinities too) is +-448, NaN is NaN."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # cvt.rn.satfinite
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448
    # Normal: move the exponent's bias from 127 to 7, keep 3 of 23 mantissa bits. A carry goes on into the exponent.
    rebiased = magnitude - (120 << 23)
    normal = (rebiased + 0x7FFFF + ((rebiased >> 20) & 1)) >> 20
    # Subnormal: above 2^14 fp32 has a spacing of 2^-9, so that the addition rounds to a multiple of it.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    result = tl.where(magnitude < 0x3C800000, subnormal, normal)  # below 2^-6
    result = tl.where(is_nan, 0x7F, result)
    return (result | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_to_fp16(x, NATIVE: tl.constexpr):
    """Returns uint8 -> fp16, exactly. NaN becomes NaN where the GPU converts, +-480 otherwise."""
    if NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # s eeee mmm -> s 0 eeee mmm 0000000: the shifted sign extension leaves a second sign bit to clear. As fp16 this has
    # the right exponent but for the bias (15 instead of 7), subnormals included.
    extended = x.to(tl.int8, bitcast=True).to(tl.int16)
    return ((extended << 7) & -0x4001).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def e4m3_pairs_to_fp16(x, NATIVE: tl.constexpr):
    """Returns uint16, two e4m3 numbers each -> fp16 of the first (low bytes) and of the second ones, as
    `e4m3_to_fp16`."""
    if NATIVE:
        # Two elements of x fill one register, and so do their results: one permutation of its bytes puts together what
        # belongs together. From shifts and masks the compiler makes three times as many instructions.
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 bytes; .reg .b16 first, second; "
            "prmt.b32 bytes, $2, 0, 0x3120; mov.b32 {first, second}, bytes; "
            "cvt.rn.f16x2.e4m3x2 $0, first; cvt.rn.f16x2.e4m3x2 $1, second; }",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        second = ((x & 0x8000) | ((x & 0x7F00) >> 1)).to(tl.float16, bitcast=True) * 256.0
    return first, second
