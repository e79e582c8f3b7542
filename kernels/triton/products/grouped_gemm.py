"""Products with grouped weights on tensor cores: the weights are the left operand, made of codes in registers.

out.T [N, M] = weights [N, K] @ x.T [K, M], so that few rows of x make a narrow product instead of a padded one, and
numbers made of codes go to the tensor cores without a detour through shared memory.

A program multiplies BLOCK_N outputs by BLOCK_M rows of x over some tiles of inputs. Small matrices have too few
blocks to keep a GPU reading, so their inputs are split; the last program of a block to arrive adds up what all of them
have, in the order of the splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.arrivals import arrival_counters, arrives_last, sum_of_parts
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.products.gated import silu_and_mul, tile_rows, tile_runs
from pagewire.kernels.triton.products.grouped_joined import multiply_tiles
from pagewire.kernels.triton.products.grouped_layout import tile_inputs, tile_width
from pagewire.kernels.triton.products.grouped_tile import MINIMUMS, SYMMETRIC, ZEROS, prefetch_tiles
from pagewire.kernels.triton.products.grouped_wide import describe_rows, multiply_wide_tiles, rows_type
from pagewire.kernels.tuning import num_multiprocessors

# What it costs a program to begin and to end, in tiles of inputs.
FIXED_TILES = 2
# What a split adds to that where rows are many: sums in fp32 are written by two programs and read by one, at what the
# L2 cache gives a multiprocessor (some 40 bytes per clock on an H100), while a tile of inputs takes a sixteenth of a
# clock for each sum.
WIDE_SPLIT_TILES = 5


@triton.jit(do_not_specialize=["num_tokens", "tiles_k", "split_tiles", "num_splits"])
def grouped_gemm_kernel(
    x_ptr,  # [num_tokens, K], rows contiguous
    x_tiles,  # WIDE: as of `multiply_wide_tiles`; else None
    codes_ptr,
    scales_ptr,  # fp16 or fp32; int32 words of an fp16 scale and an fp16 zero point; or pairs of fp32
    minimums_ptr,  # as scales, or None
    bias_ptr,  # [N], GATED [2 * N], or None
    out_ptr,  # [num_tokens, N] contiguous
    partials_ptr,  # fp32 [blocks, num_splits, BLOCK_M, BLOCK_N]
    arrived_ptr,  # int32 [blocks], zeros before and after
    num_tokens,
    output_stride,  # N
    num_inputs,
    x_stride,
    group_stride,  # rows of the weight, padded
    tiles_k,
    split_tiles,  # tiles of inputs of a split
    num_splits,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs; 0 if there is one group
    ZERO_POINT: tl.constexpr,
    FORM: tl.constexpr,
    EVEN_K: tl.constexpr,  # no tile is padded
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr,  # weights are rounded to x's dtype
    GATED: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Blocks of the same weights are neighbours: what one reads from memory the others find in the L2 cache.
    blocks_m = tl.cdiv(num_tokens, BLOCK_M)
    item = tl.program_id(0)
    block_m = item % blocks_m
    split = item // blocks_m % num_splits
    block_n = item // (blocks_m * num_splits)
    first_tile = split * split_tiles
    last_tile = tl.minimum(first_tile + split_tiles, tiles_k)

    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    # A block may have more outputs than there are: these read the last one's.
    source = tile_rows(block_n, output_stride, BLOCK_N, GATED)
    if not WIDE:  # with rows that take longer than the weight
        prefetch_tiles(codes_ptr, source, first_tile, tiles_k, WIDTH)
    wait_for_inputs()
    launch_dependents()
    token = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = (token < num_tokens)[None, :]
    x_rows = x_ptr + token.to(tl.int64)[None, :] * x_stride

    if WIDE:
        acc = multiply_wide_tiles(
            x_rows, in_rows, x_tiles, block_m * BLOCK_M, codes_ptr, scales_ptr, minimums_ptr,
            tile_runs(block_n, output_stride, BLOCK_N, GATED), num_inputs, group_stride, tiles_k, first_tile, last_tile,
            BITS, GROUP, ZERO_POINT, FORM, EVEN_K, WIDTH, BLOCK_N, BLOCK_M, dtype, INLINE_ASM, GATED,
        )  # fmt: skip
    else:
        acc = multiply_tiles(
            x_rows, in_rows, codes_ptr, scales_ptr, minimums_ptr, block_n * OUTPUTS, source,
            num_inputs, group_stride, tiles_k, first_tile, last_tile, BITS, GROUP, ZERO_POINT, FORM, EVEN_K, WIDTH,
            BLOCK_N, BLOCK_M, dtype, INLINE_ASM,
        )  # fmt: skip

    if num_splits > 1:
        block = block_n * blocks_m + block_m
        tile_offsets = tl.arange(0, BLOCK_M)[None, :] * BLOCK_N + rows[:, None]
        block_ptrs = partials_ptr + block.to(tl.int64) * num_splits * (BLOCK_N * BLOCK_M) + tile_offsets
        tl.store(block_ptrs + split * (BLOCK_N * BLOCK_M), acc, mask=in_rows)
        if not arrives_last(arrived_ptr + block, num_splits):
            return
        total = sum_of_parts(block_ptrs, BLOCK_N * BLOCK_M, num_splits, in_rows)
        _store_block(total, bias_ptr, out_ptr, token, in_rows, source, block_n, output_stride, GATED)
    else:
        # Not of one variable with the sum above: registers that are written to otherwise, too, would make ptxas wait
        # for each product before the next.
        _store_block(acc, bias_ptr, out_ptr, token, in_rows, source, block_n, output_stride, GATED)


@triton.jit
def _store_block(
    block, bias_ptr, out_ptr, token, in_rows, source, block_n, output_stride, GATED: tl.constexpr
):  # fmt: skip
    if bias_ptr is not None:
        block += tl.load(bias_ptr + source).to(tl.float32)[:, None]
    if GATED:
        block = silu_and_mul(block)
    OUTPUTS: tl.constexpr = block.shape[0]
    output = block_n * OUTPUTS + tl.arange(0, OUTPUTS)
    in_outputs = output < output_stride
    out_ptrs = out_ptr + token.to(tl.int64)[None, :] * output_stride + output[:, None]
    tl.store(out_ptrs, block.to(out_ptr.dtype.element_ty), mask=in_rows & in_outputs[:, None])


def grouped_gemm(
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
    gated: bool = False,
) -> Tensor:
    """Computes `grouped_linear`, without a permutation or a codebook; x in fp16 or bf16 (in the interpreter also fp32).
    gated: `silu_and_mul` of that.

    config: block_m (rows of x; a power of two from 8), block_n (outputs; a power of two from 16), num_warps,
    num_stages, programs_per_sm (that the splits should make, unless wide), wide (1: as `grouped_wide` multiplies, 0:
    exactly).
    """
    num_tokens, num_inputs = x.shape
    num_outputs = out_features // 2 if gated else out_features
    out = x.new_empty(num_tokens, num_outputs)
    block_m, block_n, wide = config["block_m"], config["block_n"], bool(config["wide"])
    assert not (gated and wide) or num_outputs % 8 == 0, "wide tiles of gates and ups are loaded by eight rows"
    tiles_k = codes.shape[1]
    blocks = -(-out_features // block_n) * -(-num_tokens // block_m)
    split_tiles = split_tiles_of(blocks, tiles_k, num_multiprocessors(x.device), config)
    num_splits = -(-tiles_k // split_tiles)
    partial_size = blocks * num_splits * block_n * block_m if num_splits > 1 else 0
    grouped_gemm_kernel[(blocks * num_splits,)](
        x,
        describe_rows(x, block_m, tile_inputs(bits, group_size)) if wide else None,
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
        scales.shape[1],
        tiles_k,
        split_tiles,
        num_splits,
        **weight_constants(bits, group_size, num_inputs, zero_point, scales.dim() == 3, minimums is not None),
        BLOCK_N=block_n,
        BLOCK_M=block_m,
        WIDE=wide,
        GATED=gated,
        INLINE_ASM=x.is_cuda,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **dependent_launch(x.device),
    )
    return out


def split_tiles_of(blocks: int, tiles_k: int, multiprocessors: int, config: Mapping[str, int]) -> int:
    """Tiles of inputs that one program should do."""
    if config["wide"]:  # arithmetic, which more programs than multiprocessors make no faster
        return tiles_of_split(blocks, tiles_k, multiprocessors, 0, WIDE_SPLIT_TILES)
    return tiles_of_split(blocks, tiles_k, multiprocessors, config["programs_per_sm"])


@lru_cache(maxsize=4096)
def tiles_of_split(
    blocks: int, tiles_k: int, multiprocessors: int, programs_per_sm: int, added_by_split: int = 0
) -> int:
    """Returns the number of splits that gives all multiprocessors equal work and enough programs.

    added_by_split: what it costs a program if there are several splits, in tiles of inputs.
    """

    def cost(tiles: int) -> tuple[float, int]:
        programs = blocks * -(-tiles_k // tiles)
        fixed = FIXED_TILES + (added_by_split if tiles < tiles_k else 0)
        busiest = -(-programs // multiprocessors) * (tiles + fixed)
        return busiest * max(1.0, multiprocessors * programs_per_sm / programs), -tiles

    return min(range(1, tiles_k + 1), key=cost)


@lru_cache
def weight_constants(
    bits: int, group_size: int, num_inputs: int, zero_point: int, zeros: bool, minimums: bool
) -> dict[str, Any]:
    return {
        "BITS": bits,
        "GROUP": 0 if group_size >= num_inputs else group_size,
        "ZERO_POINT": 0 if zeros or minimums else zero_point,
        "FORM": (ZEROS if zeros else MINIMUMS if minimums else SYMMETRIC).value,
        "EVEN_K": num_inputs % tile_inputs(bits, group_size) == 0,
        "WIDTH": tile_width(group_size),
    }


def scales_of_kernels(scales: Tensor) -> Tensor:
    """Returns scales as kernels load them: fp16 beside zero points as int32 words. Kernels compute their offsets, those
    of pairs too, in 32 bits."""
    assert scales.numel() < 2**31, (
        f"a weight has {scales.numel()} scales and zero points; 32-bit offsets reach 2^31 - 1"
    )
    return scales.view(torch.int32) if scales.dim() == 3 and scales.dtype is torch.float16 else scales


_TYPES = {
    "x_ptr": "",
    "x_tiles": "constexpr",
    "codes_ptr": "*i16",
    "scales_ptr": "",
    "minimums_ptr": "",
    "bias_ptr": "",
    "out_ptr": "",
    "partials_ptr": "*fp32",
    "arrived_ptr": "*i32",
    "num_tokens": "i32",
    "output_stride": "i32",
    "num_inputs": "i32",
    "x_stride": "i32",
    "group_stride": "i32",
    "tiles_k": "i32",
    "split_tiles": "i32",
    "num_splits": "i32",
}


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
    described: bool = False,
) -> Specialization:
    """Returns what `grouped_gemm` compiles for such a weight. Types as Triton names them; group_size up to
    num_inputs. described: whether x is, as on sm_90 where wide."""
    types = _TYPES | {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    types["scales_ptr"] = "*i32" if zeros and scale_dtype == "fp16" else f"*{scale_dtype}"
    types["minimums_ptr"], types["bias_ptr"] = f"*{scale_dtype}", f"*{dtype}"
    described = described and bool(config["wide"])
    if described:
        types["x_tiles"] = rows_type(dtype, config["block_m"], tile_inputs(bits, group_size))
    optional = (("minimums_ptr", minimums), ("bias_ptr", bias), ("x_tiles", described))
    absent = {name: None for name, there in optional if not there}
    constants = weight_constants(bits, group_size, num_inputs, zero_point, zeros, minimums) | absent
    constants |= {"BLOCK_N": config["block_n"], "BLOCK_M": config["block_m"], "WIDE": bool(config["wide"])}
    constants |= {"GATED": gated, "INLINE_ASM": True}
    present = {name: kind for name, kind in types.items() if name not in absent}
    return Specialization(grouped_gemm_kernel, present, constants, config["num_warps"], config["num_stages"])
