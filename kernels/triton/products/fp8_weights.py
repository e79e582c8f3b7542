"""Conversion of e4m3 weights to numbers that tensor cores multiply without fp8: in a product's registers, or a whole
weight at once.

The conversion instructions of compute capability 8.9 know fp16 only, and before there are none; here it is bit
arithmetic for two weights at a time, the same on all devices. An e4m3 number s eeee mmm, moved to where fp16 or bf16
has sign, exponent and mantissa, is right but for the exponent's bias, subnormals included: a product with a power of
two mends that. (NaN, of which no checkpoint consists, becomes +-480.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.fp8 import e4m3_to_fp16
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.products.quantize_input import GROUP, as_bytes

# Of a program of dequantize: rows, and columns.
ROWS, COLUMNS = 16, 256

# Four bytes in $2 to two pairs in $0 and $1. First each byte to the upper half of 16 bits; then, of these, the sign
# stays, and exponent and mantissa move down by 4 (bf16: 8 bits of exponent) or 1 (fp16: 5 bits).
# Times 2^120 or 2^8, the differences between the biases. fma, because capability 8.0 has no product of bf16; -0.0 keeps
# the sign of a zero.
_DECODE = """{{
.reg .b32 first, second, magnitude, power, zero;
mov.b32 power, {power};
mov.b32 zero, 0x80008000;
prmt.b32 first, $2, 0, 0x1404;
prmt.b32 second, $2, 0, 0x3424;
shr.b32 magnitude, first, {shift};
and.b32 magnitude, magnitude, {mask};
lop3.b32 first, first, zero, magnitude, 0xea;
shr.b32 magnitude, second, {shift};
and.b32 magnitude, magnitude, {mask};
lop3.b32 second, second, zero, magnitude, 0xea;
fma.rn.{kind} $0, first, power, zero;
fma.rn.{kind} $1, second, power, zero;
}}"""
TO_BF16 = tl.constexpr(_DECODE.format(shift=4, mask="0x07f007f0", power="0x7b807b80", kind="bf16x2"))
TO_FP16 = tl.constexpr(_DECODE.format(shift=1, mask="0x3f803f80", power="0x5c005c00", kind="f16x2"))


@triton.jit
def decode_weights(codes, dtype: tl.constexpr, CONVERT: tl.constexpr):
    """Returns uint8 -> dtype (fp16, bf16, fp32), exactly. CONVERT: with instructions of the GPU, which no
    interpreter knows."""
    if not CONVERT:
        return e4m3_to_fp16(codes, NATIVE=False).to(tl.float32).to(dtype)
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    return tl.inline_asm_elementwise(TO_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4).to(dtype)


@triton.jit
def dequantize_kernel(
    weight_ptr,  # [num_outputs, num_inputs] contiguous, e4m3 as uint8
    scales_ptr,  # fp32 [num_outputs], or [blocks of outputs, scales_row_size]
    out_ptr,  # as weight
    num_outputs,
    input_stride,  # num_inputs
    scales_row_size,
    BLOCK_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """Program (i, j): rows i * ROWS .., columns j * COLUMNS .."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < num_outputs, columns < input_stride
    mask = in_rows[:, None] & in_columns[None, :]
    if BLOCK_SCALES:
        blocks = rows[:, None] // GROUP * scales_row_size + columns[None, :] // GROUP
        scale = tl.load(scales_ptr + blocks, mask=mask, other=0.0)
    else:
        scale = tl.load(scales_ptr + rows, mask=in_rows, other=0.0)[:, None]
    offsets = rows.to(tl.int64)[:, None] * input_stride + columns[None, :]
    codes = tl.load(weight_ptr + offsets, mask=mask, other=0, eviction_policy="evict_first")
    values = decode_weights(codes, tl.float16, CONVERT).to(tl.float32) * scale
    tl.store(out_ptr + offsets, values.to(out_ptr.dtype.element_ty), mask=mask)


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """An `Fp8Weight`'s numbers [N, K], rounded once to dtype."""
    num_outputs, num_inputs = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(num_outputs, ROWS), triton.cdiv(num_inputs, COLUMNS))
    dequantize_kernel[grid](
        as_bytes(weight), scales, out, num_outputs, num_inputs, scales.stride(0),
        **_constants(scales.dim() == 2, weight.device.type == "cuda"),
    )  # fmt: skip
    return out


@lru_cache
def _constants(block_scales: bool, convert: bool) -> dict[str, Any]:
    return {"BLOCK_SCALES": block_scales, "GROUP": GROUP, "ROWS": ROWS, "COLUMNS": COLUMNS, "CONVERT": convert}


def specialization(out: str, *, block_scales: bool = False) -> Specialization:
    """Returns what `dequantize` launches, to compile it ahead of time; out is Triton's name of the result's type."""
    types = {
        "weight_ptr": "*u8",
        "scales_ptr": "*fp32",
        "out_ptr": f"*{out}",
        "num_outputs": "i32",
        "input_stride": "i32",
        "scales_row_size": "i32",
    }
    return Specialization(dequantize_kernel, types, _constants(block_scales, True), num_warps=4, num_stages=3)
