"""Products of few rows with grouped weights, with what comes before and behind them, as `skinny.py` says.

Otherwise as `grouped_gemm.py` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels import tuning
from pagewire.kernels.triton.common.arrivals import arrival_counters, arrives_last, sum_of_parts
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.products.gated import silu_and_mul, tile_rows
from pagewire.kernels.triton.products.grouped_gemm import scales_of_kernels, tiles_of_split, weight_constants
from pagewire.kernels.triton.products.grouped_layout import groups_fit
from pagewire.kernels.triton.products.grouped_tile import multiply_normed_tiles, prefetch_tiles
from pagewire.kernels.triton.products.skinny import MAX_ROWS
from pagewire.kernels.triton.products.stream import (
    Norm,
    load_piece,
    normed_sums,
    store_other_pieces,
    store_piece,
)
from pagewire.kernels.tuning import num_multiprocessors


@triton.jit(do_not_specialize=["num_tokens", "tiles_k", "split_tiles", "num_splits", "eps"])
def grouped_skinny_kernel(
    x_ptr,  # [num_tokens, K], rows contiguous
    residual_ptr,  # [num_tokens, K] contiguous
    updated_ptr,  # as residual
    norm_ptr,  # [K]
    codes_ptr,
    scales_ptr,  # fp16 or fp32; int32 words of an fp16 scale and an fp16 zero point; or pairs of fp32
    minimums_ptr,  # as scales, or None
    bias_ptr,  # [N] or [2 * N], or None
    out_ptr,  # [num_tokens, N] contiguous
    partials_ptr,  # fp32 [blocks, num_splits, BLOCK_N + 1, BLOCK_M]
    arrived_ptr,  # int32 [blocks], zeros before and after
    num_tokens,
    num_outputs,  # N
    num_inputs,
    x_stride,
    residual_stride,  # num_inputs
    group_stride,  # rows of the weight, padded
    tiles_k,
    split_tiles,
    num_splits,
    eps,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs; 0 if there is one group
    ZERO_POINT: tl.constexpr,
    FORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GATED: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    split = tl.program_id(0) % num_splits
    block = tl.program_id(0) // num_splits
    first_tile = split * split_tiles
    last_tile = tl.minimum(first_tile + split_tiles, tiles_k)
    source = tile_rows(block, num_outputs, BLOCK_N, GATED)
    prefetch_tiles(codes_ptr, source, first_tile, tiles_k, WIDTH)
    wait_for_inputs()
    launch_dependents()

    token = tl.arange(0, BLOCK_M)
    in_rows = (token < num_tokens)[None, :]
    rows = token.to(tl.int64)[None, :]
    piece = tl.program_id(0)
    piece_x, piece_residual = load_piece(x_ptr, residual_ptr, num_tokens, residual_stride, x_stride, piece)
    acc, squares = multiply_normed_tiles(
        x_ptr + rows * x_stride, residual_ptr + rows * residual_stride, norm_ptr, in_rows, codes_ptr, scales_ptr,
        minimums_ptr, block * OUTPUTS, source, num_inputs, group_stride, tiles_k, first_tile, last_tile, BITS, GROUP,
        ZERO_POINT, FORM, EVEN_K, WIDTH, BLOCK_N, BLOCK_M, dtype, INLINE_ASM,
    )  # fmt: skip
    store_piece(piece_x, piece_residual, updated_ptr, num_tokens, residual_stride, piece)
    programs = tl.num_programs(0)
    store_other_pieces(x_ptr, residual_ptr, updated_ptr, num_tokens, residual_stride, x_stride, piece, programs)

    if num_splits > 1:
        PART: tl.constexpr = (BLOCK_N + 1) * BLOCK_M
        elements = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M
        part = partials_ptr + block.to(tl.int64) * num_splits * PART + token
        tl.store((part + split * PART)[None, :] + elements, acc)
        tl.store(part + split * PART + BLOCK_N * BLOCK_M, squares)
        if not arrives_last(arrived_ptr + block, num_splits):
            return
        acc = sum_of_parts(part[None, :] + elements, PART, num_splits, None)
        squares = sum_of_parts(part + BLOCK_N * BLOCK_M, PART, num_splits, None)
    acc = normed_sums(acc, squares, num_inputs, eps)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + source).to(tl.float32)[:, None]
    if GATED:
        acc = silu_and_mul(acc)
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    out_ptrs = out_ptr + rows * num_outputs + output[:, None]
    tl.store(out_ptrs, acc.to(dtype), mask=in_rows & (output < num_outputs)[:, None])


def grouped_skinny_config(x: Tensor, out_features: int, bits: int, group_size: int) -> Mapping[str, int] | None:
    """Returns the configuration of `grouped_skinny_product` for these; None where it cannot, or another kernel is
    faster."""
    num_tokens, num_inputs = x.shape
    in_fp32 = x.is_cuda and x.dtype is torch.float32  # tensor cores have no such thing
    if not 0 < num_tokens <= MAX_ROWS or x.stride(1) != 1 or in_fp32 or not groups_fit(bits, group_size, num_inputs):
        return None
    shape = {"bits": bits, "group": min(group_size, num_inputs), "tokens": num_tokens}
    shape |= {"outputs": out_features, "inputs": num_inputs}
    capability = tuning.capability_of(x.device)
    config = tuning.lookup("grouped_skinny", capability, **shape)
    return config if num_tokens < config["apart_rows"] else None


def grouped_skinny_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    config: Mapping[str, int],
    *,
    norm: Norm,
    gated: bool,
) -> Tensor:
    """Computes `ops.normed_grouped_linear`, for MAX_ROWS tokens at most, without a permutation or a codebook; x in fp16
    or bf16 (in the interpreter also fp32).

    config: block_n (rows of the weight), num_warps, num_stages, programs_per_sm (that the splits should make)
    """
    num_tokens, num_inputs = x.shape
    norm.check(x)
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    num_outputs = out_features // 2 if gated else out_features
    out = x.new_empty(num_tokens, num_outputs)
    block_n, tiles_k = config["block_n"], codes.shape[1]
    blocks = -(-out_features // block_n)
    split_tiles = tiles_of_split(blocks, tiles_k, num_multiprocessors(x.device), config["programs_per_sm"])
    num_splits = -(-tiles_k // split_tiles)
    partial_size = blocks * num_splits * (block_n + 1) * MAX_ROWS if num_splits > 1 else 0
    grouped_skinny_kernel[(blocks * num_splits,)](
        x,
        norm.residual,
        norm.updated,
        norm.weight,
        codes,
        scales_of_kernels(scales),
        minimums,
        bias,
        out,
        torch.empty(partial_size, dtype=torch.float32, device=x.device),
        arrival_counters(x.device, blocks if num_splits > 1 else 1),
        num_tokens,
        num_outputs,
        num_inputs,
        x.stride(0),
        num_inputs,
        scales.shape[1],
        tiles_k,
        split_tiles,
        num_splits,
        norm.eps,
        **weight_constants(bits, group_size, num_inputs, zero_point, scales.dim() == 3, minimums is not None),
        BLOCK_N=block_n,
        BLOCK_M=MAX_ROWS,
        GATED=gated,
        INLINE_ASM=x.is_cuda,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **dependent_launch(x.device),
    )
    return out


_INTEGERS = (
    "num_tokens", "num_outputs", "num_inputs", "x_stride", "residual_stride", "group_stride", "tiles_k", "split_tiles",
)  # fmt: skip


def specialization(
    dtype: str,
    scale_dtype: str,
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
    """Returns what `grouped_skinny_product` compiles for such a weight. Types as Triton names them."""
    values = ("x_ptr", "residual_ptr", "updated_ptr", "norm_ptr", "bias_ptr", "out_ptr")
    types = dict.fromkeys(values, f"*{dtype}") | {"codes_ptr": "*i16", "minimums_ptr": f"*{scale_dtype}"}
    types["scales_ptr"] = "*i32" if zeros and scale_dtype == "fp16" else f"*{scale_dtype}"
    types |= {"partials_ptr": "*fp32", "arrived_ptr": "*i32", "num_splits": "i32", "eps": "fp32"}
    types |= dict.fromkeys(_INTEGERS, "i32")
    absent = {name: None for name, there in (("minimums_ptr", minimums), ("bias_ptr", bias)) if not there}
    constants: dict[str, Any] = weight_constants(bits, group_size, num_inputs, zero_point, zeros, minimums) | absent
    constants |= {"BLOCK_N": config["block_n"], "BLOCK_M": MAX_ROWS, "GATED": gated, "INLINE_ASM": True}
    present = {name: types[name] for name in grouped_skinny_kernel.arg_names if name in types and name not in absent}
    return Specialization(grouped_skinny_kernel, present, constants, config["num_warps"], config["num_stages"])
