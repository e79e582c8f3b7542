"""Products of single rows with grouped weights, without tensor cores.

A code needs two or three instructions: it is shifted and put into the mantissa of a power of two (16 or 256: what is
added to it costs little precision), and multiplied with x and added, all in fp32. The sum over x of what was added, and
of the zero points, is subtracted once per group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.arrivals import arrival_counters
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.products.grouped_gemm import tiles_of_split, weight_constants
from pagewire.kernels.triton.products.grouped_layout import TILE_N
from pagewire.kernels.triton.products.grouped_tile import MINIMUMS, ZEROS, group_of_tile
from pagewire.kernels.tuning import num_multiprocessors

_TILE_N = tl.constexpr(TILE_N)


@triton.constexpr_function
def _shift_left(bits: int, bit: int) -> int:
    """By how much to shift the code at `bit` of a word to the left (if negative, to the right) to where it is used.

    Codes of 4 bits are used at bit 19, as multiples of 1, or at bit 15, as sixteenths: two of them share a shift.
    """
    if bits == 8:
        return 15 - bit
    return {0: 19, 4: 11, 8: 11, 12: 3, 16: 3, 20: -5, 24: -5, 28: -9}[bit]


@triton.constexpr_function
def _place_asm(bits: int, bit: int) -> str:
    """PTX that puts the code of a word ($1) into a power of two ($0). One lop3, where a compiler sees two steps."""
    left = 15 - bit if bits == 8 else {0: 19, 4: 11, 8: 11, 12: 3, 16: 3, 20: -5, 24: -5, 28: -9}[bit]
    shift = f"shl.b32 placed, $1, {left};" if left >= 0 else f"shr.u32 placed, $1, {-left};"
    mask, one = (2**bits - 1) << (bit + left), 0x41800000 if bits == 4 else 0x43800000
    return f"{{ .reg .b32 placed; {shift} lop3.b32 $0, placed, {mask:#x}, {one:#x}, 0xea; }}"


@triton.jit
def _raw_number(words, BITS: tl.constexpr, BIT: tl.constexpr, INLINE_ASM: tl.constexpr):
    """fp32: the code at BIT, as a fraction (see `_multiplier`), and added to it 16 (4 bits) or 256 (8 bits)."""
    if INLINE_ASM:
        raw = tl.inline_asm_elementwise(_place_asm(BITS, BIT), "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        LEFT: tl.constexpr = _shift_left(BITS, BIT)
        MASK: tl.constexpr = (2**BITS - 1) << (BIT + LEFT)
        placed = words << LEFT if LEFT >= 0 else words >> -LEFT
        raw = (placed & MASK) | (0x41800000 if BITS == 4 else 0x43800000)
    return raw.to(tl.float32, bitcast=True)


@triton.constexpr_function
def _multiplier(bits: int, bit: int) -> float:
    """What the fraction of `_raw_number` must be multiplied with to be the code."""
    return 16.0 if bits == 4 and bit in (4, 12, 20) else 1.0


@triton.jit(do_not_specialize=["tiles_k", "split_tiles", "num_splits"])
def grouped_gemv_kernel(
    x_ptr,  # [num_tokens, K], rows contiguous
    words_ptr,  # codes, two elements at a time
    scales_ptr,  # fp16 or fp32; with zero points in pairs
    minimums_ptr,  # or None
    permutation_ptr,  # int32 [K], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [num_tokens, N] contiguous
    partials_ptr,  # fp32 [blocks, num_splits, BLOCK_N]
    arrived_ptr,  # int32 [blocks], zeros before and after
    num_tokens,
    num_outputs,
    num_inputs,
    x_stride,
    group_stride,  # outputs, padded
    tiles_k,
    split_tiles,
    num_splits,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs; 0 if there is one group
    ZERO_POINT: tl.constexpr,
    FORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    wait_for_inputs()
    launch_dependents()
    PLANES: tl.constexpr = 16 // BITS
    TILE_K: tl.constexpr = WIDTH * PLANES
    GROUPS: tl.constexpr = TILE_K // GROUP if GROUP > 0 and GROUP < TILE_K else 1
    WORDS: tl.constexpr = WIDTH // 2
    PAIR: tl.constexpr = 2 if FORM == ZEROS else 1
    OFFSET: tl.constexpr = 16.0 if BITS == 4 else 256.0
    item = tl.program_id(0)
    row = item % num_tokens
    split = item // num_tokens % num_splits
    block_n = item // (num_tokens * num_splits)
    first_tile = split * split_tiles
    last_tile = tl.minimum(first_tile + split_tiles, tiles_k)

    rows = tl.arange(0, BLOCK_N)
    word = tl.arange(0, WORDS)
    output = block_n * BLOCK_N + rows
    # A block may have more outputs than there are, padding included: these read the last one's.
    source = tl.minimum(output, group_stride - 1)
    rows_there = source - block_n * BLOCK_N
    row_offsets = rows_there // _TILE_N * (tiles_k * _TILE_N * WORDS) + rows_there % _TILE_N * WORDS
    if BLOCK_N < _TILE_N:
        row_offsets += block_n * BLOCK_N % _TILE_N * WORDS
    first_word = (block_n.to(tl.int64) * BLOCK_N // _TILE_N * tiles_k + first_tile) * (_TILE_N * WORDS)
    words_ptrs = words_ptr + first_word + row_offsets[:, None] + word[None, :]
    x_ptr += row.to(tl.int64) * x_stride
    acc = tl.zeros([BLOCK_N, WORDS], dtype=tl.float32)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        words = tl.load(words_ptrs)
        words_ptrs += _TILE_N * WORDS
        group = group_of_tile(tile, TILE_K, GROUP)
        for index in tl.static_range(GROUPS):
            scale_ptrs = scales_ptr + PAIR * ((group + index) * group_stride + source)
            scale = tl.load(scale_ptrs).to(tl.float32)[:, None]
            whole = tl.zeros([WORDS], dtype=tl.float32)  # sum of x where codes are whole numbers
            sixteenths = tl.zeros([WORDS], dtype=tl.float32)
            part = tl.zeros([BLOCK_N, WORDS], dtype=tl.float32)
            for code in tl.static_range(index * (2 * PLANES // GROUPS), (index + 1) * (2 * PLANES // GROUPS)):
                column = tile * TILE_K + code // 2 * WIDTH + 2 * word + code % 2
                in_x = column < num_inputs
                if permutation_ptr is not None:
                    column = tl.load(
                        permutation_ptr + column, mask=None if EVEN_K else in_x, other=None if EVEN_K else 0
                    )
                x = tl.load(x_ptr + column, mask=None if EVEN_K else in_x, other=None if EVEN_K else 0.0).to(tl.float32)
                if _multiplier(BITS, code // 2 * BITS + code % 2 * 16) == 1.0:
                    whole += x
                else:
                    sixteenths += x
                    x *= 16.0
                part += _raw_number(words, BITS, code // 2 * BITS + code % 2 * 16, INLINE_ASM) * x[None, :]
            x_sum = whole + sixteenths
            added = (whole + 16.0 * sixteenths) * OFFSET
            if FORM == ZEROS:
                zero = tl.load(scale_ptrs + 1).to(tl.float32)[:, None]
                acc += scale * (part - added[None, :] - zero * x_sum[None, :])
            else:
                acc += scale * (part - (added + ZERO_POINT * x_sum)[None, :])
            if FORM == MINIMUMS:
                minimum = tl.load(minimums_ptr + (group + index) * group_stride + source)
                acc += minimum.to(tl.float32)[:, None] * x_sum[None, :]
    total = tl.sum(acc, axis=1)

    if num_splits > 1:
        block = block_n * num_tokens + row
        block_ptrs = partials_ptr + block.to(tl.int64) * num_splits * BLOCK_N + rows
        tl.store(block_ptrs + split * BLOCK_N, total)
        tl.debug_barrier()  # all threads have stored before one of them counts the program
        if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu") < num_splits - 1:
            return
        tl.store(arrived_ptr + block, 0)  # for the next launch: all of the block's programs have counted
        total = tl.zeros([BLOCK_N], dtype=tl.float32)
        for other in tl.range(0, num_splits, num_stages=4):  # the latency of a load is all that this loop costs
            total += tl.load(block_ptrs + other * BLOCK_N, cache_modifier=".cg")
    in_outputs = output < num_outputs
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=in_outputs, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row.to(tl.int64) * num_outputs + output
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_outputs)


def grouped_gemv(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    config: Mapping[str, int],
) -> Tensor:
    """Computes `grouped_linear` without a codebook; x is gathered as it is loaded.

    config: block_n (outputs; a power of two from 16), num_warps, num_stages, programs_per_sm (that the splits should
    make).
    """
    num_tokens, num_inputs = x.shape
    out = x.new_empty(num_tokens, out_features)
    block_n, tiles_k = config["block_n"], codes.shape[1]
    blocks = -(-out_features // block_n) * num_tokens
    split_tiles = tiles_of_split(blocks, tiles_k, num_multiprocessors(x.device), config["programs_per_sm"])
    num_splits = -(-tiles_k // split_tiles)
    grouped_gemv_kernel[(blocks * num_splits,)](
        x,
        codes.view(torch.int32),
        scales,
        minimums,
        permutation,
        bias,
        out,
        torch.empty(blocks * num_splits * block_n if num_splits > 1 else 0, dtype=torch.float32, device=x.device),
        arrival_counters(x.device, blocks if num_splits > 1 else 1),
        num_tokens,
        out_features,
        num_inputs,
        x.stride(0),
        scales.shape[1],
        tiles_k,
        split_tiles,
        num_splits,
        **weight_constants(bits, group_size, num_inputs, zero_point, scales.dim() == 3, minimums is not None),
        BLOCK_N=block_n,
        STAGES=config["num_stages"],
        INLINE_ASM=x.is_cuda,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **dependent_launch(x.device),
    )
    return out


_TYPES = {
    "x_ptr": "",
    "words_ptr": "*i32",
    "scales_ptr": "",
    "minimums_ptr": "",
    "permutation_ptr": "*i32",
    "bias_ptr": "",
    "out_ptr": "",
    "partials_ptr": "*fp32",
    "arrived_ptr": "*i32",
    "num_tokens": "i32",
    "num_outputs": "i32",
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
    permutation: bool = False,
    bias: bool = False,
) -> Specialization:
    """Returns what `grouped_gemv` compiles for such a weight. Types as Triton names them; group_size up to
    num_inputs."""
    types = _TYPES | {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "bias_ptr": f"*{dtype}"}
    types |= {"scales_ptr": f"*{scale_dtype}", "minimums_ptr": f"*{scale_dtype}"}
    optional = {"minimums_ptr": minimums, "permutation_ptr": permutation, "bias_ptr": bias}
    absent = {name: None for name, there in optional.items() if not there}
    constants = weight_constants(bits, group_size, num_inputs, zero_point, zeros, minimums) | absent
    constants |= {"BLOCK_N": config["block_n"], "STAGES": config["num_stages"], "INLINE_ASM": True}
    present = {name: kind for name, kind in types.items() if name not in absent}
    return Specialization(grouped_gemv_kernel, present, constants, config["num_warps"], config["num_stages"])
