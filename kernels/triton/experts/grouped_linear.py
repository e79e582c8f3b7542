"""The op grouped_experts_linear on CUDA.

The layout "cuda" has tiles of TILE_N outputs, so an expert must have whole ones; its codes are then neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels import tuning
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.experts.blocks import block_of_expert, num_blocks, tile_of_program
from pagewire.kernels.triton.experts.linear import experts_linear
from pagewire.kernels.triton.products.gated import silu_and_mul, tile_rows, tile_runs
from pagewire.kernels.triton.products.grouped_dequantize import dequantize
from pagewire.kernels.triton.products.grouped_gemm import scales_of_kernels, weight_constants
from pagewire.kernels.triton.products.grouped_joined import multiply_tiles
from pagewire.kernels.triton.products.grouped_layout import TILE_N, groups_fit
from pagewire.kernels.triton.products.grouped_tile import prefetch_tiles
from pagewire.kernels.triton.products.grouped_wide import multiply_wide_tiles


@triton.jit(do_not_specialize=["pairs_per_row", "row_blocks", "tiles_k"])
def grouped_experts_kernel(
    x_ptr,  # [pairs / pairs_per_row, K], rows contiguous
    codes_ptr,
    scales_ptr,  # as of `grouped_gemm_kernel`
    minimums_ptr,
    bias_ptr,  # [NUM_EXPERTS * N], GATED 2 * N, or None
    order_ptr,
    starts_ptr,
    out_ptr,  # [pairs, N] contiguous
    pairs_per_row,
    row_blocks,
    output_stride,  # N
    num_inputs,
    x_stride,
    group_stride,  # rows of the weight
    tiles_k,
    NUM_EXPERTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr,  # as of `grouped_gemm_kernel`
    GATED: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    wait_for_inputs()
    launch_dependents()
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of a tile
    block, tile = tile_of_program(tl.program_id(0), row_blocks, tl.cdiv(output_stride, OUTPUTS))
    expert, first, stop = block_of_expert(starts_ptr, block, NUM_EXPERTS, BLOCK_M)
    if first >= stop:
        return
    expert_row = expert * (2 * output_stride if GATED else output_stride)
    # A block may have more outputs than the expert: these read its last one's.
    source = expert_row + tile_rows(tile, output_stride, BLOCK_N, GATED)
    if not WIDE:  # before the pairs are known
        prefetch_tiles(codes_ptr, source, 0, tiles_k, WIDTH)
    places = first + tl.arange(0, BLOCK_M)
    in_rows = (places < stop)[None, :]
    pairs = tl.load(order_ptr + places, mask=places < stop, other=0)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    x_rows = x_ptr + (pairs // pairs_per_row).to(tl.int64) * x_stride
    if WIDE:
        rows = expert_row + tile_runs(tile, output_stride, BLOCK_N, GATED)
        acc = multiply_wide_tiles(
            x_rows, in_rows, None, 0, codes_ptr, scales_ptr, minimums_ptr, rows, num_inputs, group_stride, tiles_k, 0,
            tiles_k, BITS, GROUP, ZERO_POINT, FORM, EVEN_K, WIDTH, BLOCK_N, BLOCK_M, dtype, INLINE_ASM, GATED,
        )  # fmt: skip
    else:
        acc = multiply_tiles(
            x_rows, in_rows, codes_ptr, scales_ptr, minimums_ptr, expert_row + tile * OUTPUTS, source,
            num_inputs, group_stride, tiles_k, 0, tiles_k, BITS, GROUP, ZERO_POINT, FORM, EVEN_K, WIDTH, BLOCK_N,
            BLOCK_M, dtype, INLINE_ASM,
        )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + source).to(tl.float32)[:, None]
    if GATED:
        acc = silu_and_mul(acc)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = in_rows & (outputs < output_stride)[:, None]
    tl.store(out_ptr + pairs.to(tl.int64) * output_stride + outputs[:, None], acc.to(dtype), mask=mask)


def grouped_experts_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    gated: bool,
) -> Tensor:
    """Computes `reference.grouped_experts_linear` of a weight in the layout "cuda"; x may have any stride between rows.

    As in `grouped_linear`, what the kernel does not multiply is dequantized first, and so rounded to x's dtype:
    codebooks, groups that do not fit the layout's tiles, and, on a GPU, fp32.
    """
    num_pairs, num_experts = order.shape[0], starts.shape[0] - 1
    num_rows, num_inputs = out_features // num_experts, x.shape[1]
    num_outputs = num_rows // 2 if gated else num_rows
    assert out_features % (num_experts * TILE_N) == 0, f"experts' outputs must be multiples of {TILE_N}"
    in_fp32 = x.is_cuda and x.dtype is torch.float32  # tensor cores have no such thing
    if codebook is not None or not groups_fit(bits, group_size, num_inputs) or in_fp32:
        shape = (out_features, num_inputs)
        dense = dequantize(codes, scales, offsets, codebook, shape, bits, group_size, zero_point, x.dtype)
        return experts_linear(x, dense, bias, order, starts, gated)
    out = x.new_empty(num_pairs, num_outputs)
    if num_pairs == 0:
        return out
    assert num_pairs % x.shape[0] == 0, "x must have a row per token or per pair"
    if x.stride(1) != 1:
        x = x.contiguous()
    # As a product of one expert with as many rows as it has on average.
    config = tuning.lookup(
        "grouped_gemm", tuning.capability_of(x.device), bits=bits, group=min(group_size, num_inputs),
        tokens=triton.cdiv(num_pairs, num_experts), outputs=num_rows, inputs=num_inputs,
    )  # fmt: skip
    row_blocks = num_blocks(num_pairs, num_experts, config["block_m"])
    grouped_experts_kernel[(row_blocks * triton.cdiv(num_rows, config["block_n"]),)](
        x,
        codes,
        scales_of_kernels(scales),
        offsets,
        bias,
        order,
        starts,
        out,
        num_pairs // x.shape[0],
        row_blocks,
        num_outputs,
        num_inputs,
        x.stride(0),
        scales.shape[1],
        codes.shape[1],
        NUM_EXPERTS=num_experts,
        **weight_constants(bits, group_size, num_inputs, zero_point, scales.dim() == 3, offsets is not None),
        BLOCK_N=config["block_n"],
        BLOCK_M=config["block_m"],
        WIDE=bool(config["wide"]),
        GATED=gated,
        INLINE_ASM=x.is_cuda,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **dependent_launch(x.device),
    )
    return out


_TYPES = {
    "x_ptr": "",
    "codes_ptr": "*i16",
    "scales_ptr": "",
    "minimums_ptr": "",
    "bias_ptr": "",
    "order_ptr": "*i32",
    "starts_ptr": "*i32",
    "out_ptr": "",
    "pairs_per_row": "i32",
    "row_blocks": "i32",
    "output_stride": "i32",
    "num_inputs": "i32",
    "x_stride": "i32",
    "group_stride": "i32",
    "tiles_k": "i32",
}


def specialization(
    dtype: str,
    scale_dtype: str,
    num_experts: int,
    bits: int,
    group_size: int,
    num_inputs: int,
    config: Mapping[str, int],
    *,
    zero_point: int = 0,
    zeros: bool = False,
    minimums: bool = False,
    bias: bool = False,
    gated: bool = False,
) -> Specialization:
    """Returns what `grouped_experts_linear` compiles for such a weight. Types as Triton names them."""
    types = _TYPES | {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    types["scales_ptr"] = "*i32" if zeros and scale_dtype == "fp16" else f"*{scale_dtype}"
    types["minimums_ptr"], types["bias_ptr"] = f"*{scale_dtype}", f"*{dtype}"
    absent = {name: None for name, there in (("minimums_ptr", minimums), ("bias_ptr", bias)) if not there}
    constants: dict[str, Any] = {"NUM_EXPERTS": num_experts}
    constants |= weight_constants(bits, group_size, num_inputs, zero_point, zeros, minimums) | absent
    constants |= {"BLOCK_N": config["block_n"], "BLOCK_M": config["block_m"], "WIDE": bool(config["wide"])}
    constants |= {"GATED": gated, "INLINE_ASM": True}
    present = {name: kind for name, kind in types.items() if name not in absent}
    return Specialization(grouped_experts_kernel, present, constants, config["num_warps"], config["num_stages"])
