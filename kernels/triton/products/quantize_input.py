"""Activations to int8 or float8 e4m3 on CUDA, with a scale per token or per 128 inputs of a token.

A scale is max|x| / LIMIT, LIMIT being 127 or 448; or one for all, fixed at calibration, beyond which values saturate.
Products need only look at scales to be right about what no code can hold: the scale of a token (or group) with a NaN is
NaN, and so is one that would be computed from an infinity, as in the reference.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.quantized import FP8_BLOCK
from pagewire.kernels.triton.common.fp8 import e4m3_from_fp32, has_native_encode
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization

GROUP = FP8_BLOCK  # inputs that share a scale where weights have scales per block
# Elements of a program. Longer rows are read twice, the second time from the L2 cache.
MAX_TILE = 8192
GROUPED_TILE = 4096
_SMALLEST_SCALE = tl.constexpr(1e-12)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(x):
    """Returns |x| of fp32 as int32, ordered as the numbers are, with NaN the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, LIMIT: tl.constexpr):
    """The scale of numbers of which `largest` has the largest magnitude_bits."""
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), LIMIT)
    scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
    return tl.where(largest >= _INFINITY, float("nan"), scale)


@triton.jit
def encode(x, scale, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Returns fp32 / scale as int8, or as e4m3 in uint8; rounded to nearest even, saturated."""
    quotient = tl.div_rn(x, scale)
    if dtype == tl.uint8:
        codes = e4m3_from_fp32(quotient, NATIVE_FP8)
    else:
        # fp32 numbers from 2^23 to 2^24 are the integers: the addition rounds. The low byte is the code.
        rounded = tl.minimum(tl.maximum(quotient, -128.0), 127.0) + 12582912.0
        codes = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    return codes


@triton.jit
def quantize_tokens_kernel(
    x_ptr,
    input_scale_ptr,  # fp32 [1], or None
    codes_ptr,  # [num_tokens, SIZE] contiguous: int8, or fp8 as uint8
    scales_ptr,  # fp32 [num_tokens]
    x_token_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """One program per token."""
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, TILE)
    source = x_ptr + token * x_token_stride + offsets
    target = codes_ptr + token * SIZE + offsets
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    x = tl.load(source, mask=offsets < SIZE, other=0.0).to(tl.float32)
    magnitudes = magnitude_bits(x)
    for start in range(TILE, SIZE, TILE):
        more = tl.load(source + start, mask=start + offsets < SIZE, other=0.0).to(tl.float32)
        magnitudes = tl.maximum(magnitudes, magnitude_bits(more))
    largest = tl.max(magnitudes)
    if input_scale_ptr is None:
        scale = scale_of(largest, LIMIT)
    else:
        scale = tl.load(input_scale_ptr)
        scale = tl.where(largest > _INFINITY, float("nan"), scale)
    tl.store(scales_ptr + token, scale)
    tl.store(target, encode(x, scale, dtype, NATIVE_FP8), mask=offsets < SIZE)
    for start in range(TILE, SIZE, TILE):
        more = tl.load(source + start, mask=start + offsets < SIZE, other=0.0).to(tl.float32)
        tl.store(target + start, encode(more, scale, dtype, NATIVE_FP8), mask=start + offsets < SIZE)


@triton.jit(do_not_specialize=["num_tokens"])
def quantize_groups_kernel(
    x_ptr,
    codes_ptr,  # [num_tokens, SIZE] contiguous, fp8 as uint8
    scales_ptr,  # fp32 [cdiv(SIZE, GROUP), num_tokens]
    num_tokens,
    x_token_stride,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Program (token, i): groups i * GROUPS .. of one token."""
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = offsets < SIZE
    x = tl.load(x_ptr + token * x_token_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(x), axis=1), LIMIT)
    # A product reads the scales of all tokens at one group: these are neighbours.
    tl.store(scales_ptr + groups.to(tl.int64) * num_tokens + token, scale, mask=groups * GROUP < SIZE)
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    codes = encode(x, scale[:, None], dtype, NATIVE_FP8)
    tl.store(codes_ptr + token * SIZE + offsets, codes, mask=mask)


def quantize_tokens(x: Tensor, input_scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `dtype` (int8 or float8_e4m3fn) like x [num_tokens, size], and their scales, float32 [num_tokens].

    x may have any stride between rows.
    """
    codes, num_tokens, size = _codes_like(x, dtype)
    assert input_scale is None or input_scale.shape == (1,), "input_scale must be [1]"
    assert input_scale is None or input_scale.dtype == torch.float32, "input_scale must be float32"
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens > 0:
        constants, num_warps = _token_constants(size, dtype, has_native_encode(x.device))
        quantize_tokens_kernel[(num_tokens,)](
            x,
            input_scale,
            as_bytes(codes),
            scales,
            x.stride(0),
            **constants,
            num_warps=num_warps,
            **dependent_launch(x.device),
        )
    return codes, scales


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float8_e4m3fn like x [num_tokens, size], and scales, float32 [cdiv(size, GROUP), num_tokens].

    x may have any stride between rows.
    """
    codes, num_tokens, size = _codes_like(x, torch.float8_e4m3fn)
    num_groups = triton.cdiv(size, GROUP)
    scales = torch.empty(num_groups, num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens > 0:
        constants, num_warps = _group_constants(size, has_native_encode(x.device))
        grid = (num_tokens, triton.cdiv(num_groups, constants["GROUPS"]))
        quantize_groups_kernel[grid](
            x,
            as_bytes(codes),
            scales,
            num_tokens,
            x.stride(0),
            **constants,
            num_warps=num_warps,
            **dependent_launch(x.device),
        )
    return codes, scales


def as_bytes(codes: Tensor) -> Tensor:
    """Returns tensors as kernels see them: fp8 as uint8 (see `pagewire.kernels.triton.common.fp8`)."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def _codes_like(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    num_tokens, size = x.shape
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    return torch.empty(x.shape, dtype=dtype, device=x.device), num_tokens, size


@lru_cache
def _token_constants(size: int, dtype: torch.dtype, native_fp8: bool) -> tuple[dict[str, Any], int]:
    tile = min(MAX_TILE, triton.next_power_of_2(size))
    limit = 448.0 if dtype == torch.float8_e4m3fn else 127.0
    constants = {"SIZE": size, "TILE": tile, "LIMIT": limit, "NATIVE_FP8": native_fp8}
    return constants, min(16, max(1, tile // 512))  # 16 elements per thread: their codes are one 16-byte store


@lru_cache
def _group_constants(size: int, native_fp8: bool) -> tuple[dict[str, Any], int]:
    groups = min(GROUPED_TILE // GROUP, triton.next_power_of_2(triton.cdiv(size, GROUP)))
    constants = {"SIZE": size, "GROUP": GROUP, "GROUPS": groups, "LIMIT": 448.0, "NATIVE_FP8": native_fp8}
    return constants, max(1, groups * GROUP // 512)


def tokens_specialization(
    dtype: str, size: int, *, fp8: bool, native_fp8: bool = False, fixed_scale: bool = False
) -> Specialization:
    """Returns what `quantize_tokens` launches, to compile it ahead of time; dtype is Triton's name of x's type."""
    types = {
        "x_ptr": f"*{dtype}",
        "input_scale_ptr": "*fp32" if fixed_scale else "constexpr",
        "codes_ptr": "*u8" if fp8 else "*i8",
        "scales_ptr": "*fp32",
        "x_token_stride": "i32",
    }
    constants, num_warps = _token_constants(size, torch.float8_e4m3fn if fp8 else torch.int8, native_fp8)
    absent = {} if fixed_scale else {"input_scale_ptr": None}
    return Specialization(quantize_tokens_kernel, types, constants | absent, num_warps, num_stages=2)


def groups_specialization(dtype: str, size: int, *, native_fp8: bool = False) -> Specialization:
    """Returns what `quantize_groups` launches, to compile it ahead of time; dtype is Triton's name of x's type."""
    types = {
        "x_ptr": f"*{dtype}",
        "codes_ptr": "*u8",
        "scales_ptr": "*fp32",
        "num_tokens": "i32",
        "x_token_stride": "i32",
    }
    constants, num_warps = _group_constants(size, native_fp8)
    return Specialization(quantize_groups_kernel, types, constants, num_warps, num_stages=2)
