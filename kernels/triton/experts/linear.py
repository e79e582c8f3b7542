"""The ops experts_linear and fp8_experts_linear on CUDA.

A tile is [outputs, pairs], the transposed of the result's, as in `products/scaled_product.py`: few pairs of an expert
are then the columns of a matrix instruction, of which there may be as few as 8, and converted weights go from registers
to it.

Where an expert has few pairs, a product is mostly the reading of its weight, and activations stay as they are. Where it
has many and the GPU multiplies fp8, activations are quantized for fp8 weights, as `fp8_linear` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels import tuning
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, prefetch, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.elementwise.activation import silu_and_mul as silu_and_mul_rows
from pagewire.kernels.triton.experts.blocks import block_of_expert, num_blocks, tile_of_program
from pagewire.kernels.triton.products.fp8_linear import multiplies_fp8
from pagewire.kernels.triton.products.fp8_weights import decode_weights
from pagewire.kernels.triton.products.gated import of_rows, silu_and_mul, tile_rows
from pagewire.kernels.triton.products.quantize_input import GROUP, as_bytes, quantize_groups, quantize_tokens
from pagewire.kernels.triton.products.scaled_product import check_operands, step_scale

# With more pairs than these of an expert on average, activations are quantized for fp8 weights: at 4 TB/s a weight is
# read while 90 pairs are multiplied in 16 bits, but before that its conversion for each block of pairs costs more than
# quantizing (a model, not a measurement).
WEIGHT_ONLY_PAIRS = 32

# Bytes of each row of the weight that a program prefetches before it knows its pairs, if it has this many.
_PREFETCHED = tl.constexpr(512)
_LINE = tl.constexpr(128)

_COUNTS = ["pairs_per_row", "row_blocks", "x_scales_group_stride", "scales_row_size"]


@triton.jit(do_not_specialize=_COUNTS)
def experts_linear_kernel(
    x_ptr,  # [pairs / pairs_per_row, K], rows contiguous
    weight_ptr,  # [NUM_EXPERTS * N, K] contiguous, GATED 2 * N: as x, or with x as it is e4m3 as uint8
    x_scales_ptr,  # of e4m3 x: fp32 [pairs / pairs_per_row], or [groups, ..] x_scales_group_stride apart; None
    scales_ptr,  # of e4m3: fp32 [rows of the weight], or [blocks of them, scales_row_size]; None
    bias_ptr,  # [rows of the weight], or None
    order_ptr,
    starts_ptr,
    out_ptr,  # [pairs, N] contiguous
    pairs_per_row,
    row_blocks,
    output_stride,  # N
    input_stride,  # K
    x_stride,
    x_scales_group_stride,
    scales_row_size,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # pairs of a tile
    BLOCK_N: tl.constexpr,  # rows of the weight in a tile
    BLOCK_K: tl.constexpr,  # inputs of a step
    EVEN: tl.constexpr,  # whether steps end where inputs do
    BLOCK_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERT: tl.constexpr,  # weight-only: how (`fp8_weights.decode_weights`)
    GATED: tl.constexpr,
):
    wait_for_inputs()
    launch_dependents()
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of a tile
    block, tile = tile_of_program(tl.program_id(0), row_blocks, tl.cdiv(output_stride, OUTPUTS))
    expert, first, stop = block_of_expert(starts_ptr, block, NUM_EXPERTS, BLOCK_M)
    if first >= stop:
        return
    expert_row = expert * (2 * output_stride if GATED else output_stride)
    # Beyond the last output the last one is read again: loads need no mask for it.
    rows = expert_row.to(tl.int64) + tile_rows(tile, output_stride, BLOCK_N, GATED)
    ELEMENTS: tl.constexpr = _LINE * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    line = tl.minimum(tl.arange(0, _PREFETCHED // _LINE) * ELEMENTS, input_stride - 1)
    prefetch(weight_ptr + rows[:, None] * input_stride + line[None, :])
    places = first + tl.arange(0, BLOCK_M)
    in_rows = places < stop
    pairs = tl.load(order_ptr + places, mask=in_rows, other=0)
    columns = pairs // pairs_per_row
    inputs = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + rows[:, None] * input_stride + inputs[None, :]
    x_rows = x_ptr + columns.to(tl.int64)[None, :] * x_stride + inputs[:, None]
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    WEIGHT_ONLY: tl.constexpr = weight_ptr.dtype.element_ty == tl.uint8
    TOKENS_FIRST: tl.constexpr = BLOCK_SCALES and x_scales_ptr is not None  # as in scaled_product_kernel
    acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_FIRST else [BLOCK_N, BLOCK_M], dtype=tl.float32)
    if BLOCK_SCALES:
        # A tile has one block of outputs, or one of gates and one of ups. Scales are loaded a step ahead, so that no
        # product is waited for twice.
        tl.static_assert(BLOCK_N <= GROUP)
        block_row = (expert_row + tile * OUTPUTS) // GROUP
        weight_scales = scales_ptr + block_row.to(tl.int64) * scales_row_size
        up_scales = weight_scales
        if GATED:
            up_scales += (output_stride // GROUP).to(tl.int64) * scales_row_size
        scale = step_scale(weight_scales, x_scales_ptr, columns, x_scales_group_stride, 0)
        up_scale = scale
        if GATED:
            up_scale = step_scale(up_scales, x_scales_ptr, columns, x_scales_group_stride, 0)
    steps = tl.cdiv(input_stride, BLOCK_K)
    for step in tl.range(0, steps):
        start = step * BLOCK_K
        if EVEN:
            weight = tl.load(weight_rows + start)
            x = tl.load(x_rows + start)
        else:
            weight = tl.load(weight_rows + start, mask=(start + inputs < input_stride)[None, :], other=0.0)
            x = tl.load(x_rows + start, mask=(start + inputs < input_stride)[:, None], other=0.0)
        if WEIGHT_ONLY:
            weight = decode_weights(weight, x_dtype, CONVERT)
        if BLOCK_SCALES:
            next_block = tl.minimum(step + 1, steps - 1) * BLOCK_K // GROUP
            next_scale = step_scale(weight_scales, x_scales_ptr, columns, x_scales_group_stride, next_block)
            next_up_scale = next_scale
            if GATED:
                next_up_scale = step_scale(up_scales, x_scales_ptr, columns, x_scales_group_stride, next_block)
            if TOKENS_FIRST:
                acc += tl.dot(tl.trans(x), tl.trans(weight)) * of_rows(
                    scale[:, None], up_scale[:, None], True, BLOCK_N, GATED
                )
            else:
                acc += tl.dot(weight, x, input_precision="tf32x3") * of_rows(scale, up_scale, False, BLOCK_N, GATED)
            scale = next_scale
            up_scale = next_up_scale
        else:
            acc = tl.dot(weight, x, acc, input_precision="tf32x3")
    if TOKENS_FIRST:
        acc = tl.trans(acc)
    if scales_ptr is not None and not BLOCK_SCALES:
        acc *= tl.load(scales_ptr + rows)[:, None]
        if x_scales_ptr is not None:
            acc *= tl.load(x_scales_ptr + columns)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    if GATED:
        acc = silu_and_mul(acc)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = in_rows[None, :] & (outputs < output_stride)[:, None]
    target = out_ptr + pairs.to(tl.int64)[None, :] * output_stride + outputs[:, None]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)


def experts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    """Computes `reference.experts_linear`; x may have any stride between rows."""
    assert weight.dtype is x.dtype, "weight must have x's dtype"
    return _product(x, None, weight, None, bias, order, starts, x.dtype, gated)


def fp8_experts_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    """Computes `reference.fp8_experts_linear`, with quantize_input or without; x may have any stride between rows."""
    check_operands(x, weight, torch.float8_e4m3fn, scales, bias)
    many = order.shape[0] > WEIGHT_ONLY_PAIRS * (starts.shape[0] - 1)
    quantize = many and multiplies_fp8(x.device)
    return fp8_product(x, weight, scales, bias, order, starts, gated, quantize=quantize)


def fp8_product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    gated: bool,
    *,
    quantize: bool,
) -> Tensor:
    """Computes `fp8_experts_linear`; quantize: x to e4m3, or else it is multiplied as it is."""
    if not quantize:
        return _product(x, None, weight, scales, bias, order, starts, x.dtype, gated)
    codes, x_scales = quantize_groups(x) if scales.dim() == 2 else quantize_tokens(x, None, weight.dtype)
    return _product(codes, x_scales, weight, scales, bias, order, starts, x.dtype, gated)


def _product(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    dtype: torch.dtype,
    gated: bool,
) -> Tensor:
    num_pairs, num_experts = order.shape[0], starts.shape[0] - 1
    num_rows, num_inputs = weight.shape[0] // num_experts, weight.shape[1]
    block_scales = scales is not None and scales.dim() == 2
    if gated and block_scales and num_rows // 2 % GROUP:  # gates and ups share a block of scales
        return silu_and_mul_rows(_product(x, x_scales, weight, scales, bias, order, starts, dtype, False))
    num_outputs = num_rows // 2 if gated else num_rows
    assert weight.is_contiguous() and weight.shape[1] == x.shape[1], "weight must be contiguous, of x's inputs"
    assert weight.shape[0] % num_experts == 0, "experts must have as many outputs each"
    out = torch.empty(num_pairs, num_outputs, dtype=dtype, device=x.device)
    if num_pairs == 0:
        return out
    assert num_pairs % x.shape[0] == 0, "x must have a row per token or per pair"
    if x.stride(1) != 1:
        x = x.contiguous()
    config = tuning.lookup(
        "experts", tuning.capability_of(x.device), x_bytes=x.dtype.itemsize, weight_bytes=weight.dtype.itemsize,
        tokens=triton.cdiv(num_pairs, num_experts), outputs=num_rows, inputs=num_inputs,
    )  # fmt: skip
    constants = _constants(
        config["block_m"], config["block_n"], config["block_k"], num_experts, num_inputs, block_scales, x.is_cuda, gated
    )
    row_blocks = num_blocks(num_pairs, num_experts, constants["BLOCK_M"])
    experts_linear_kernel[(row_blocks * triton.cdiv(num_rows, constants["BLOCK_N"]),)](
        x,
        as_bytes(weight) if x_scales is None else weight,  # a GPU without fp8 products does not support the type
        x_scales,
        scales,
        bias,
        order,
        starts,
        out,
        num_pairs // x.shape[0],
        row_blocks,
        num_outputs,
        num_inputs,
        x.stride(0),
        x_scales.stride(0) if x_scales is not None and x_scales.dim() == 2 else 0,
        0 if scales is None else scales.stride(0),
        **constants,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **dependent_launch(x.device),
    )
    return out


@lru_cache(maxsize=4096)
def _constants(
    block_m: int, block_n: int, block_k: int, num_experts: int, num_inputs: int, block_scales: bool, convert: bool,
    gated: bool,
) -> dict[str, Any]:  # fmt: skip
    if block_scales:
        block_n, block_k = min(block_n, GROUP), min(block_k, GROUP)
    return {
        "NUM_EXPERTS": num_experts,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "EVEN": num_inputs % block_k == 0,
        "BLOCK_SCALES": block_scales,
        "GROUP": GROUP,
        "CONVERT": convert,
        "GATED": gated,
    }


def specialization(
    x: str,
    out: str,
    num_experts: int,
    num_inputs: int,
    config: Mapping[str, int],
    *,
    fp8: bool = False,
    block_scales: bool = False,
    bias: bool = False,
    gated: bool = False,
) -> Specialization:
    """Returns what `experts_linear` and `fp8_experts_linear` launch, to compile it ahead of time.

    x and out are Triton's names of types, x "fp8e4nv" where it is quantized; fp8: whether the weight is.
    """
    quantized = x == "fp8e4nv"
    types = {
        "x_ptr": f"*{x}",
        "weight_ptr": "*u8" if fp8 and not quantized else f"*{x}",
        "x_scales_ptr": "*fp32" if quantized else "constexpr",
        "scales_ptr": "*fp32" if fp8 else "constexpr",
        "bias_ptr": f"*{out}" if bias else "constexpr",
        "order_ptr": "*i32",
        "starts_ptr": "*i32",
        "out_ptr": f"*{out}",
        "pairs_per_row": "i32",
        "row_blocks": "i32",
        "output_stride": "i32",
        "input_stride": "i32",
        "x_stride": "i32",
        "x_scales_group_stride": "i32",
        "scales_row_size": "i32",
    }
    absent = {name: None for name, kind in types.items() if kind == "constexpr"}
    tile = (config["block_m"], config["block_n"], config["block_k"])
    constants = _constants(*tile, num_experts, num_inputs, block_scales, True, gated)
    return Specialization(experts_linear_kernel, types, constants | absent, config["num_warps"], config["num_stages"])
