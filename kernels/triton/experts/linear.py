"""experts_linear and fp8_experts_linear on CUDA.

A tile is [outputs, pairs], the transposed of the result's, as in `products/scaled_product.py`: few pairs of an expert
are then the columns of a matrix instruction, of which there may be as few as 8, and converted weights go from registers
to it. Activations stay as they are: a product with an expert's weight is mostly the reading of that weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import Specialization
from pagewire.kernels.triton.experts.blocks import block_of_expert, num_blocks
from pagewire.kernels.triton.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.products.fp8_weights import decode_weights
from pagewire.kernels.triton.products.quantize_input import GROUP, as_bytes
from pagewire.kernels.triton.products.scaled_product import check_operands

# By the pairs that an expert has on average, up to: pairs and outputs of a tile, bytes of x's inputs of a step, warps,
# stages. Three stages of the largest fit into 99 KiB of shared memory (sm_89).
_TILES = ((16, (16, 64, 256, 4, 4)), (32, (32, 128, 128, 4, 3)), (64, (64, 128, 128, 4, 3)), (0, (128, 128, 128, 8, 3)))
_LARGEST_FP32_TILE = _TILES[1][1]  # three products make one of fp32, from registers

_COUNTS = ["pairs_per_row", "row_blocks", "scales_row_size"]


@triton.jit(do_not_specialize=_COUNTS)
def experts_linear_kernel(
    x_ptr,  # [pairs / pairs_per_row, K], rows contiguous
    weight_ptr,  # [NUM_EXPERTS * N, K] contiguous: as x, or e4m3 as uint8
    scales_ptr,  # of e4m3: fp32 [NUM_EXPERTS * N], or [blocks of outputs, scales_row_size]; None
    bias_ptr,  # [NUM_EXPERTS * N], or None
    order_ptr,
    starts_ptr,
    out_ptr,  # [pairs, N] contiguous
    pairs_per_row,
    row_blocks,
    output_stride,  # N
    input_stride,  # K
    x_stride,
    scales_row_size,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # pairs of a tile
    BLOCK_N: tl.constexpr,  # outputs of a tile
    BLOCK_K: tl.constexpr,  # inputs of a step
    EVEN: tl.constexpr,  # whether steps end where inputs do
    BLOCK_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERT: tl.constexpr,  # e4m3: how (`fp8_weights.decode_weights`)
):
    wait_for_inputs()
    launch_dependents()
    # Blocks of one expert are neighbours: what one reads from memory the others find in the L2 cache.
    item = tl.program_id(0)
    expert, first, stop = block_of_expert(starts_ptr, item % row_blocks, NUM_EXPERTS, BLOCK_M)
    if first >= stop:
        return
    places = first + tl.arange(0, BLOCK_M)
    in_rows = places < stop
    pairs = tl.load(order_ptr + places, mask=in_rows, other=0).to(tl.int64)
    outputs = item // row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the last output the last one is read again: loads need no mask for it.
    rows = expert.to(tl.int64) * output_stride + tl.minimum(outputs, output_stride - 1)
    inputs = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + rows[:, None] * input_stride + inputs[None, :]
    x_rows = x_ptr + (pairs // pairs_per_row)[None, :] * x_stride + inputs[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for step in tl.range(0, tl.cdiv(input_stride, BLOCK_K)):
        start = step * BLOCK_K
        if EVEN:
            weight = tl.load(weight_rows + start)
            x = tl.load(x_rows + start)
        else:
            weight = tl.load(weight_rows + start, mask=(start + inputs < input_stride)[None, :], other=0)
            x = tl.load(x_rows + start, mask=(start + inputs < input_stride)[:, None], other=0.0)
        if scales_ptr is not None:
            weight = decode_weights(weight, dtype, CONVERT)
        if BLOCK_SCALES:
            scale = tl.load(scales_ptr + rows // GROUP * scales_row_size + start // GROUP)
            acc += tl.dot(weight, x, input_precision="tf32x3") * scale[:, None]
        else:
            acc = tl.dot(weight, x, acc, input_precision="tf32x3")
    if scales_ptr is not None and not BLOCK_SCALES:
        acc *= tl.load(scales_ptr + rows)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    mask = in_rows[None, :] & (outputs < output_stride)[:, None]
    tl.store(out_ptr + pairs[None, :] * output_stride + outputs[:, None], acc.to(dtype), mask=mask)


def experts_linear(x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor) -> Tensor:
    """As `reference.experts_linear`; x may have any stride between rows."""
    assert weight.dtype is x.dtype, "weight must have x's dtype"
    return _product(x, weight, None, bias, order, starts)


def fp8_experts_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor
) -> Tensor:
    """As `reference.fp8_experts_linear`; x may have any stride between rows."""
    check_operands(x, weight, torch.float8_e4m3fn, scales, bias)
    return _product(x, weight, scales, bias, order, starts)


def _product(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, order: Tensor, starts: Tensor
) -> Tensor:
    num_pairs, num_experts = order.shape[0], starts.shape[0] - 1
    num_outputs, num_inputs = weight.shape[0] // num_experts, weight.shape[1]
    assert weight.is_contiguous() and weight.shape[1] == x.shape[1], "weight must be contiguous, of x's inputs"
    assert weight.shape[0] % num_experts == 0, "experts must have as many outputs each"
    out = x.new_empty(num_pairs, num_outputs)
    if num_pairs == 0:
        return out
    assert num_pairs % x.shape[0] == 0, "x must have a row per token or per pair"
    if x.stride(1) != 1:
        x = x.contiguous()
    block_scales = scales is not None and scales.dim() == 2
    constants, options = _launch(num_pairs, num_experts, num_inputs, x.dtype.itemsize, block_scales, x.is_cuda)
    row_blocks = num_blocks(num_pairs, num_experts, constants["BLOCK_M"])
    experts_linear_kernel[(row_blocks * triton.cdiv(num_outputs, constants["BLOCK_N"]),)](
        x,
        weight if scales is None else as_bytes(weight),
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
        0 if scales is None else scales.stride(0),
        **constants,
        **options,
        **dependent_launch(x.device),
    )
    return out


@lru_cache(maxsize=4096)
def _launch(
    num_pairs: int, num_experts: int, num_inputs: int, itemsize: int, block_scales: bool, convert: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """(constants, launch options)"""
    average = triton.cdiv(num_pairs, num_experts)
    tile = next(tile for pairs, tile in _TILES if average <= pairs or pairs == 0)
    if itemsize == 4:
        tile = min(tile, _LARGEST_FP32_TILE)
    block_m, block_n, step_bytes, num_warps, num_stages = tile
    block_k = step_bytes // itemsize
    constants = {
        "NUM_EXPERTS": num_experts,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "EVEN": num_inputs % block_k == 0,
        "BLOCK_SCALES": block_scales,
        "GROUP": GROUP,
        "CONVERT": convert,
    }
    return constants, {"num_warps": num_warps, "num_stages": num_stages}


def specialization(
    dtype: str,
    num_pairs: int,
    num_experts: int,
    num_inputs: int,
    *,
    fp8: bool = False,
    block_scales: bool = False,
    bias: bool = False,
) -> Specialization:
    """What `experts_linear` and `fp8_experts_linear` launch, to compile it ahead of time; dtype as Triton names it."""
    types = {
        "x_ptr": f"*{dtype}",
        "weight_ptr": "*u8" if fp8 else f"*{dtype}",
        "scales_ptr": "*fp32" if fp8 else "constexpr",
        "bias_ptr": f"*{dtype}" if bias else "constexpr",
        "order_ptr": "*i32",
        "starts_ptr": "*i32",
        "out_ptr": f"*{dtype}",
        "pairs_per_row": "i32",
        "row_blocks": "i32",
        "output_stride": "i32",
        "input_stride": "i32",
        "x_stride": "i32",
        "scales_row_size": "i32",
    }
    absent = {name: None for name, kind in types.items() if kind == "constexpr"}
    constants, options = _launch(num_pairs, num_experts, num_inputs, 4 if dtype == "fp32" else 2, block_scales, True)
    return Specialization(experts_linear_kernel, types, constants | absent, **options)
