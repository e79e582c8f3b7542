"""Products of few rows with dense weights, limited by reading the weight; fused with the operations around them.

Before: x is added to the residual stream, and the norm of the sum is multiplied (`stream.py`). Behind: silu(gate) * up,
where gates and ups are one weight (`gated.py`).

A tile is [outputs, tokens], the transposed of the result's: then the tokens are those columns of a matrix instruction
that may be as few as 8. Where tiles are too few to fill a GPU, the inputs are split; the last program of a tile to
arrive adds up the sums of all, always in the order of the splits. Rows too many for a fused norm still have their
products here: unlike a library's kernels, these begin while the one before ends, and read the weight meanwhile.
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
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, prefetch, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.products.gated import silu_and_mul, tile_rows
from pagewire.kernels.triton.products.grouped_gemm import tiles_of_split
from pagewire.kernels.triton.products.stream import (
    Norm,
    load_piece,
    normed_inputs,
    normed_sums,
    store_other_pieces,
    store_piece,
)
from pagewire.kernels.tuning import num_multiprocessors

# Rows of a tile, with a norm and without one; more rows have another kernel. A norm is computed by every program, for
# all inputs: with more rows that takes longer than a launch of its own.
MAX_ROWS, MAX_ROWS_APART = 8, 64
# Bytes of each row of the weight that a program prefetches before it waits, if it has this many.
_PREFETCHED = tl.constexpr(1024)
_LINE = tl.constexpr(128)


@triton.jit(do_not_specialize=["num_tokens", "steps_per_split", "eps"])
def skinny_kernel(
    x_ptr,  # [num_tokens, K]
    residual_ptr,  # [num_tokens, K] contiguous, or None: x is multiplied as it is
    updated_ptr,  # as residual
    norm_ptr,  # [K]
    weight_ptr,  # [N, K] contiguous; GATED: [2 * N, K]
    bias_ptr,  # [N] or [2 * N], or None
    out_ptr,  # [num_tokens, N] contiguous
    partials_ptr,  # fp32 [tiles, splits, BLOCK_N + 1, BLOCK_M], or None where nothing is split
    arrived_ptr,  # int32 [tiles]: how many of a tile's splits are done; in the end 0
    num_tokens,
    output_stride,  # N
    input_stride,  # K
    x_token_stride,
    steps_per_split,
    eps,
    BLOCK_M: tl.constexpr,  # tokens
    BLOCK_N: tl.constexpr,  # rows of the weight
    BLOCK_K: tl.constexpr,  # inputs of a step
    EVEN: tl.constexpr,  # whether steps end where inputs do
    GATED: tl.constexpr,
):
    """Program (i, j): tile i of outputs, split j of the inputs."""
    tile = tl.program_id(0)
    rows = tile_rows(tile, output_stride, BLOCK_N, GATED)
    inputs = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * steps_per_split
    last = tl.minimum(first + steps_per_split, tl.cdiv(input_stride, BLOCK_K))
    weight_starts = weight_ptr + rows.to(tl.int64) * input_stride
    # While the kernel before this one ends, memory would have nothing to do.
    ELEMENTS: tl.constexpr = _LINE * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    line = first * BLOCK_K + tl.arange(0, _PREFETCHED // _LINE) * ELEMENTS
    prefetch(weight_starts[:, None] + tl.minimum(line, input_stride - 1)[None, :])
    wait_for_inputs()
    launch_dependents()

    tokens = tl.arange(0, BLOCK_M)
    # Beyond the last row the last one is read again: loads need no mask for it.
    columns = tl.minimum(tokens, num_tokens - 1)
    weight_rows = weight_starts[:, None] + inputs[None, :]
    x_rows = x_ptr + columns[None, :] * x_token_stride + inputs[:, None]
    residual_offsets = columns[None, :] * input_stride + inputs[:, None]
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_M], dtype=tl.float32)
    piece = tl.program_id(1) * tl.num_programs(0) + tile
    if residual_ptr is not None:
        piece_x, piece_residual = load_piece(x_ptr, residual_ptr, num_tokens, input_stride, x_token_stride, piece)
        # A step ahead, as loads of so few bytes are waited for. Beyond the last input x is 0.
        norm = tl.load(norm_ptr + tl.minimum(first * BLOCK_K + inputs, input_stride - 1))
    for step in tl.range(first, last):
        start = step * BLOCK_K
        there = start + inputs < input_stride
        if EVEN:
            weight = tl.load(weight_rows + start)
            x = tl.load(x_rows + start)
        else:
            weight = tl.load(weight_rows + start, mask=there[None, :], other=0.0)
            x = tl.load(x_rows + start, mask=there[:, None], other=0.0)
        if residual_ptr is not None:
            if EVEN:
                residual = tl.load(residual_ptr + residual_offsets + start)
            else:
                residual = tl.load(residual_ptr + residual_offsets + start, mask=there[:, None], other=0.0)
            x, squares = normed_inputs(x, residual, norm, squares, dtype)
            norm = tl.load(norm_ptr + tl.minimum(start + BLOCK_K + inputs, input_stride - 1))
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    square = tl.sum(squares, axis=0)
    if residual_ptr is not None:
        programs = tl.num_programs(0) * tl.num_programs(1)
        store_piece(piece_x, piece_residual, updated_ptr, num_tokens, input_stride, piece)
        store_other_pieces(x_ptr, residual_ptr, updated_ptr, num_tokens, input_stride, x_token_stride, piece, programs)

    if partials_ptr is not None:
        num_splits = tl.num_programs(1)
        PART: tl.constexpr = (BLOCK_N + 1) * BLOCK_M
        part = partials_ptr + (tile.to(tl.int64) * num_splits) * PART + tokens
        elements = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M
        mine = part + tl.program_id(1) * PART
        tl.store(mine[None, :] + elements, acc)
        if residual_ptr is not None:
            tl.store(mine + BLOCK_N * BLOCK_M, square)
        if not arrives_last(arrived_ptr + tile, num_splits):
            return
        acc = sum_of_parts(part[None, :] + elements, PART, num_splits, None)
        if residual_ptr is not None:
            square = sum_of_parts(part + BLOCK_N * BLOCK_M, PART, num_splits, None)

    if residual_ptr is not None:
        acc = normed_sums(acc, square, input_stride, eps)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    if GATED:
        acc = silu_and_mul(acc)
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = (tokens < num_tokens)[None, :] & (outputs < output_stride)[:, None]
    target = out_ptr + tokens.to(tl.int64)[None, :] * output_stride + outputs[:, None]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)


def skinny_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: Mapping[str, int],
    *,
    norm: Norm | None,
    gated: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes x [num_tokens, K], of `norm` or as it is, @ weight.T + bias, or with `gated` silu_and_mul of that.

    Up to MAX_ROWS tokens, without a norm MAX_ROWS_APART, any row stride; weight contiguous, of x's dtype. dtype: the
    result's; None: x's.

    config: block_n, block_k, num_warps, num_stages, programs_per_sm (that the splits should make)
    """
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    most = MAX_ROWS_APART if norm is None else MAX_ROWS
    assert 0 < num_tokens <= most, f"a tile has up to {most} rows"
    assert weight.dtype == x.dtype and weight.is_contiguous(), "weight must be contiguous, of x's dtype"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    if norm is not None:
        norm.check(x)
    out = torch.empty(num_tokens, num_outputs, dtype=dtype or x.dtype, device=x.device)
    constants = _constants(num_tokens, config["block_n"], config["block_k"], num_inputs, gated)
    tiles = triton.cdiv(weight.shape[0], constants["BLOCK_N"])
    steps = triton.cdiv(num_inputs, constants["BLOCK_K"])
    per_split = tiles_of_split(tiles, steps, num_multiprocessors(x.device), config["programs_per_sm"])
    splits = triton.cdiv(steps, per_split)
    partials = arrived = None
    if splits > 1:
        size = tiles * splits * (constants["BLOCK_N"] + 1) * constants["BLOCK_M"]
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device, tiles)
    residual, updated, norm_weight, eps = norm or (None, None, None, 0.0)
    skinny_kernel[(tiles, splits)](
        x, residual, updated, norm_weight, weight, bias, out, partials, arrived,
        num_tokens, num_outputs, num_inputs, x.stride(0), per_split, eps,
        **constants, num_warps=config["num_warps"], num_stages=config["num_stages"], **dependent_launch(x.device),
    )  # fmt: skip
    return out


def tile_tokens(num_tokens: int) -> int:
    """Returns the tokens of a tile that holds so many: few different numbers, as each is another compilation."""
    return max(MAX_ROWS, 1 << (num_tokens - 1).bit_length())


@cache
def _constants(num_tokens: int, block_n: int, block_k: int, num_inputs: int, gated: bool) -> dict[str, Any]:
    even = num_inputs % block_k == 0
    return {"BLOCK_M": tile_tokens(num_tokens), "BLOCK_N": block_n, "BLOCK_K": block_k, "EVEN": even, "GATED": gated}


def specialization(
    dtype: str,
    config: Mapping[str, int],
    *,
    num_tokens: int = MAX_ROWS,
    norm: bool = False,
    gated: bool = False,
    split: bool = False,
    bias: bool = False,
    num_inputs: int = 4096,
    residual: str | None = None,
    out: str | None = None,
) -> Specialization:
    """Returns what `skinny_product` launches, to compile it ahead of time; dtype, residual and out are Triton's names
    of types."""
    types = {
        "x_ptr": f"*{dtype}",
        "residual_ptr": f"*{residual or dtype}",
        "updated_ptr": f"*{residual or dtype}",
        "norm_ptr": f"*{dtype}",
        "weight_ptr": f"*{dtype}",
        "bias_ptr": f"*{dtype}",
        "out_ptr": f"*{out or dtype}",
        "partials_ptr": "*fp32",
        "arrived_ptr": "*i32",
        "num_tokens": "i32",
        "output_stride": "i32",
        "input_stride": "i32",
        "x_token_stride": "i32",
        "steps_per_split": "i32",
        "eps": "fp32",
    }
    optional = {
        ("residual_ptr", "updated_ptr", "norm_ptr"): norm,
        ("bias_ptr",): bias,
        ("partials_ptr", "arrived_ptr"): split,
    }
    absent = {name: None for names, there in optional.items() if not there for name in names}
    constants = _constants(num_tokens, config["block_n"], config["block_k"], num_inputs, gated) | absent
    present = {name: kind for name, kind in types.items() if name not in absent}
    return Specialization(skinny_kernel, present, constants, config["num_warps"], config["num_stages"])
