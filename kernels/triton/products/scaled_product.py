"""Products with weights of one byte (int8 or e4m3) that scales multiply, in Triton.

What is multiplied: int8 with int8, e4m3 with e4m3 (compute capability 8.9 and above), or, weight-only, numbers of 16 or
32 bits with e4m3 that the kernel converts. A tile is [outputs, tokens], the transposed of the result's: then the tokens
are those columns of a matrix instruction that may be as few as 8, and converted weights go from registers to it.

Scales: per output and per token, which multiply a tile once; or per block of 128 x 128 of the weight and per 128 inputs
of a token, which multiply the products of each step. On compute capability 9.0 that waits for these, once per 128
inputs; another program of the multiprocessor multiplies meanwhile where registers leave room for one.

Where tiles are too few to fill a GPU, the inputs are cut into splits. Each program then writes its sums to `partials`
and counts itself; the last one of a tile to arrive adds them up, in the order of the splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.arrivals import arrival_counters, arrives_last, sum_of_parts
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.elementwise.activation import silu_and_mul as silu_and_mul_rows
from pagewire.kernels.triton.products.fp8_weights import decode_weights
from pagewire.kernels.triton.products.gated import of_rows, silu_and_mul, tile_rows
from pagewire.kernels.triton.products.quantize_input import GROUP, as_bytes
from pagewire.kernels.tuning import num_multiprocessors

# Steps of a split, at least: fewer cost more than they gain, as the loads of the first ones are waited for.
MIN_STEPS = 4


@triton.jit
def step_scale(weight_scales, x_scales_ptr, columns, x_scales_group_stride, block):
    """Returns the scale of the products of a block of inputs: fp32, per token where tokens have scales.

    weight_scales points to those of the tile's block of outputs.
    """
    scale = tl.load(weight_scales + block)
    if x_scales_ptr is not None:
        scale *= tl.load(x_scales_ptr + tl.cast(block, tl.int64) * x_scales_group_stride + columns)
    return scale


_COUNTS = ["num_tokens", "x_scales_group_stride", "scales_row_size", "steps_per_split"]


@triton.jit(do_not_specialize=_COUNTS)  # or each kind of number would be another compilation
def scaled_product_kernel(
    x_ptr,  # [num_tokens, num_inputs]: int8, e4m3; or weight-only fp16, bf16, fp32
    weight_ptr,  # [num_outputs, num_inputs] contiguous, GATED twice as many: int8, e4m3; or weight-only e4m3 as uint8
    x_scales_ptr,  # fp32 [num_tokens], or [groups, num_tokens] with rows x_scales_group_stride apart; or None
    scales_ptr,  # fp32 [rows of the weight], or [blocks of them, scales_row_size]
    bias_ptr,  # [rows of the weight], or None
    out_ptr,  # [num_tokens, num_outputs] contiguous
    partials_ptr,  # int32 or fp32 [splits, tiles, BLOCK_N, BLOCK_M], or None where nothing is split
    arrived_ptr,  # int32 [tiles]: how many of a tile's splits are done; in the end 0
    num_tokens,
    output_stride,  # num_outputs
    input_stride,  # num_inputs
    x_token_stride,
    x_scales_group_stride,
    scales_row_size,
    steps_per_split,
    BLOCK_M: tl.constexpr,  # tokens of a tile
    BLOCK_N: tl.constexpr,  # rows of the weight in a tile
    BLOCK_K: tl.constexpr,  # inputs of a step
    EVEN: tl.constexpr,  # whether steps end where inputs do
    BLOCK_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERT: tl.constexpr,  # weight-only: how (`fp8_weights.decode_weights`)
    TOKENS_FIRST: tl.constexpr,  # tiles are multiplied as [tokens, outputs]
    GATED: tl.constexpr,
):
    wait_for_inputs()
    launch_dependents()
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of a tile
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    tiles_n = tl.cdiv(output_stride, OUTPUTS)
    # Programs that run together share rows of x and of the weight: 8 tiles of tokens, for one of outputs after another.
    tile = tl.program_id(0)
    first_m = tile // (8 * tiles_n) * 8
    in_group = tl.minimum(tiles_m - first_m, 8)
    tile_m = first_m + tile % (8 * tiles_n) % in_group
    tile_n = tile % (8 * tiles_n) // in_group

    tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # Beyond the last row the last one is read again: loads need no mask for it.
    rows = tile_rows(tile_n, output_stride, BLOCK_N, GATED)
    columns = tl.minimum(tokens, num_tokens - 1)
    inputs = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * steps_per_split
    last = tl.minimum(first + steps_per_split, tl.cdiv(input_stride, BLOCK_K))
    weight_rows = weight_ptr + rows.to(tl.int64)[:, None] * input_stride + inputs[None, :]
    x_rows = x_ptr + columns.to(tl.int64)[None, :] * x_token_stride + inputs[:, None]
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    INTEGER: tl.constexpr = x_dtype == tl.int8
    WEIGHT_ONLY: tl.constexpr = weight_ptr.dtype.element_ty == tl.uint8
    acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_FIRST else [BLOCK_N, BLOCK_M], tl.int32 if INTEGER else tl.float32)
    if BLOCK_SCALES:
        # A tile has one block of outputs, or one of gates and one of ups. Scales are loaded a step ahead, so that no
        # product is waited for twice.
        tl.static_assert(BLOCK_N <= GROUP)
        weight_scales = scales_ptr + tile_n * OUTPUTS // GROUP * scales_row_size
        scale = step_scale(weight_scales, x_scales_ptr, columns, x_scales_group_stride, first * BLOCK_K // GROUP)
        up_scale = scale
        if GATED:
            up_scales = weight_scales + output_stride // GROUP * scales_row_size
            up_scale = step_scale(up_scales, x_scales_ptr, columns, x_scales_group_stride, first * BLOCK_K // GROUP)
    for step in tl.range(first, last):
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
            next_block = tl.minimum(step + 1, last - 1) * BLOCK_K // GROUP
            next_scale = step_scale(weight_scales, x_scales_ptr, columns, x_scales_group_stride, next_block)
            next_up_scale = next_scale
            if GATED:
                next_up_scale = step_scale(up_scales, x_scales_ptr, columns, x_scales_group_stride, next_block)
            if TOKENS_FIRST:
                of_sums = of_rows(scale[:, None], up_scale[:, None], True, BLOCK_N, GATED)
                acc += tl.dot(tl.trans(x), tl.trans(weight)) * of_sums
            elif x_scales_ptr is not None:
                acc += tl.dot(weight, x) * of_rows(scale[None, :], up_scale[None, :], False, BLOCK_N, GATED)
            else:
                acc += tl.dot(weight, x, input_precision="tf32x3") * of_rows(scale, up_scale, False, BLOCK_N, GATED)
            scale = next_scale
            up_scale = next_up_scale
        elif INTEGER:
            acc = tl.dot(weight, x, acc, out_dtype=tl.int32)
        else:
            # Fast accumulation of e4m3: `fp8_linear.py` says why.
            acc = tl.dot(weight, x, acc, input_precision="tf32x3")
    if TOKENS_FIRST:
        acc = tl.trans(acc)

    if partials_ptr is not None:
        TILE: tl.constexpr = BLOCK_N * BLOCK_M
        num_splits = tl.num_programs(1)
        elements = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        partials = partials_ptr + tile.to(tl.int64) * TILE + elements
        split_stride = tl.num_programs(0).to(tl.int64) * TILE
        tl.store(partials + tl.program_id(1) * split_stride, acc)
        if not arrives_last(arrived_ptr + tile, num_splits):
            return
        acc = sum_of_parts(partials, split_stride, num_splits, None)

    result = acc.to(tl.float32)
    if not BLOCK_SCALES:
        result *= tl.load(scales_ptr + rows)[:, None]
        if x_scales_ptr is not None:
            result *= tl.load(x_scales_ptr + columns)[None, :]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    if GATED:
        result = silu_and_mul(result)
    # The tile's offsets fit in 32 bits, those in all of the result may not.
    out_tile = out_ptr + (tile_m * BLOCK_M).to(tl.int64) * output_stride + tile_n * OUTPUTS
    target = out_tile + tl.arange(0, BLOCK_M)[None, :] * output_stride + tl.arange(0, OUTPUTS)[:, None]
    outputs = tile_n * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = (tokens < num_tokens)[None, :] & (outputs < output_stride)[:, None]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)


def scaled_product(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor | None,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: Mapping[str, int],
    *,
    gated: bool = False,
) -> Tensor:
    """Computes x [num_tokens, K] times weight [N, K].T, scaled, + bias, as `dtype` [num_tokens, N]; gated:
    `silu_and_mul` of it.

    x          as the weight: int8 or float8_e4m3fn; or, with an fp8 weight, float16, bfloat16, float32 as it is
    x_scales   float32 [num_tokens], or [cdiv(K, 128), num_tokens]; None where x is as it is
    scales     float32 [N], or of an fp8 weight [cdiv(N, 128), cdiv(K, 128)]
    config     block_m, block_n, block_k, num_warps, num_stages, programs_per_sm (that the splits should make)
    """
    (num_tokens, num_inputs), num_rows = x.shape, weight.shape[0]
    block_scales = scales.dim() == 2
    if gated and block_scales and num_rows // 2 % GROUP:  # gates and ups share a block of scales
        return silu_and_mul_rows(scaled_product(x, weight, x_scales, scales, bias, dtype, config))
    num_outputs = num_rows // 2 if gated else num_rows
    out = torch.empty(num_tokens, num_outputs, dtype=dtype, device=x.device)
    constants = _constants(
        config["block_m"], config["block_n"], config["block_k"], num_inputs, block_scales, x_scales is not None,
        x.device.type == "cuda", gated,
    )  # fmt: skip
    tiles_n = triton.cdiv(num_rows, constants["BLOCK_N"])
    tiles = triton.cdiv(num_tokens, constants["BLOCK_M"]) * tiles_n
    # As for the next power of two of tokens, so that a warm-up with these compiles all that serving will launch.
    expected_tiles = triton.cdiv(triton.next_power_of_2(num_tokens), constants["BLOCK_M"]) * tiles_n
    steps = triton.cdiv(num_inputs, constants["BLOCK_K"])
    programs = config["programs_per_sm"] * num_multiprocessors(x.device)
    splits, steps_per_split = _splits(expected_tiles, steps, programs)
    partials = arrived = None
    if splits > 1:
        sums = torch.int32 if x.dtype == torch.int8 else torch.float32
        partials = torch.empty(
            splits * tiles * constants["BLOCK_M"] * constants["BLOCK_N"], dtype=sums, device=x.device
        )
        arrived = arrival_counters(x.device, tiles)
    scaled_product_kernel[(tiles, splits)](
        x,
        as_bytes(weight) if x_scales is None else weight,  # a GPU without fp8 products does not support the type
        x_scales,
        scales,
        bias,
        out,
        partials,
        arrived,
        num_tokens,
        num_outputs,
        num_inputs,
        x.stride(0),
        x_scales.stride(0) if x_scales is not None and x_scales.dim() == 2 else 0,
        scales.stride(0),
        steps_per_split,
        **constants,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **dependent_launch(x.device),
    )
    return out


def check_operands(x: Tensor, weight: Tensor, dtype: torch.dtype, scales: Tensor, bias: Tensor | None) -> None:
    """Checks the arguments of int8_linear and fp8_linear; `dtype` is the weight's."""
    assert weight.dtype == dtype, f"weight must be {dtype}"
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16), "x must be float32, float16 or bfloat16"
    assert x.dim() == 2, "x must be [num_tokens, K]"
    assert x.shape[1] == weight.shape[1], "x and weight must have as many inputs"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    assert scales.dtype == torch.float32, "scales must be float32"
    assert scales.is_contiguous(), "scales must be contiguous"
    assert bias is None or bias.shape == (weight.shape[0],), "bias must be [N]"
    assert bias is None or bias.dtype == x.dtype, "bias must have x's dtype"


def _splits(tiles: int, steps: int, programs: int) -> tuple[int, int]:
    """How many splits, and steps of each; the last one may have fewer."""
    wanted = max(1, min(programs // tiles, steps // MIN_STEPS))
    steps_per_split = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, steps_per_split), steps_per_split


@cache
def _constants(
    block_m: int, block_n: int, block_k: int, num_inputs: int, block_scales: bool, quantized: bool, convert: bool,
    gated: bool,
) -> dict[str, Any]:  # fmt: skip
    """quantized: whether x is."""
    if block_scales:
        block_n, block_k = min(block_n, GROUP), min(block_k, GROUP)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "EVEN": num_inputs % block_k == 0,
        "BLOCK_SCALES": block_scales,
        "GROUP": GROUP,
        "CONVERT": convert,
        # A thread has sums of two rows and many columns of a tile, so that scales of rows cost it two loads a step.
        "TOKENS_FIRST": block_scales and quantized and block_m >= 64,
        "GATED": gated,
    }


def specialization(
    x: str,
    out: str,
    config: Mapping[str, int],
    *,
    split: bool = False,
    block_scales: bool = False,
    bias: bool = False,
    gated: bool = False,
    num_inputs: int = 4096,
) -> Specialization:
    """Returns what `scaled_product` launches, to compile it ahead of time.

    x and out are Triton's names of types: "i8" for int8 products, "fp8e4nv" for those of fp8, else weight-only.
    """
    types = {
        "x_ptr": f"*{x}",
        "weight_ptr": f"*{x}" if x in ("i8", "fp8e4nv") else "*u8",
        "x_scales_ptr": "*fp32" if x in ("i8", "fp8e4nv") else "constexpr",
        "scales_ptr": "*fp32",
        "bias_ptr": f"*{out}" if bias else "constexpr",
        "out_ptr": f"*{out}",
        "partials_ptr": ("*i32" if x == "i8" else "*fp32") if split else "constexpr",
        "arrived_ptr": "*i32" if split else "constexpr",
        "num_tokens": "i32",
        "output_stride": "i32",
        "input_stride": "i32",
        "x_token_stride": "i32",
        "x_scales_group_stride": "i32",
        "scales_row_size": "i32",
        "steps_per_split": "i32",
    }
    absent = {name: None for name, kind in types.items() if kind == "constexpr"}
    tile = (config["block_m"], config["block_n"], config["block_k"])
    constants = _constants(*tile, num_inputs, block_scales, x in ("i8", "fp8e4nv"), True, gated)
    return Specialization(scaled_product_kernel, types, constants | absent, config["num_warps"], config["num_stages"])
