"""Grouped weights back to numbers: whole matrices for wide products, and single rows for embeddings.

Any group size and any codebook, for here groups and tiles need not fit together. The result is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from pagewire.kernels.triton.products.grouped_layout import TILE_N, tile_width

_TILE_N = tl.constexpr(TILE_N)
_EMBEDDING_TILES = 8  # of inputs, that a program of the embedding does
_GATHER_TILE = 1024


@triton.jit
def _numbers(
    codes,  # int16
    scale_ptrs,  # of each element
    minimum_ptrs,
    zero_point,
    codebook_ptr,
    in_bounds,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """fp32 numbers of one plane."""
    code = (codes.to(tl.int32) >> (BITS * PLANE)) & (2**BITS - 1)
    if codebook_ptr is not None:
        number = tl.load(codebook_ptr + code)
    else:
        # 2^23 + code, for integers take long to convert
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    if PAIRS:
        number -= tl.load(scale_ptrs + 1, mask=in_bounds, other=0.0).to(tl.float32)
    elif minimum_ptrs is None and codebook_ptr is None:
        number -= zero_point
    number *= tl.load(scale_ptrs, mask=in_bounds, other=0.0).to(tl.float32)
    if minimum_ptrs is not None:
        number += tl.load(minimum_ptrs, mask=in_bounds, other=0.0).to(tl.float32)
    return number


@triton.jit(do_not_specialize=["tiles_k", "zero_point"])
def grouped_dequantize_kernel(
    codes_ptr,
    scales_ptr,
    minimums_ptr,  # or None
    codebook_ptr,  # or None
    out_ptr,  # [N, K] contiguous
    num_outputs,
    num_inputs,
    group_stride,  # outputs, padded
    tiles_k,
    zero_point,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per tile."""
    TILE_K: tl.constexpr = WIDTH * (16 // BITS)
    rows = tl.arange(0, _TILE_N)
    element = tl.arange(0, WIDTH)
    tile = tl.program_id(0)
    tile_n = tile // tiles_k
    tile_k = tile % tiles_k
    codes_ptrs = codes_ptr + tile.to(tl.int64) * (_TILE_N * WIDTH) + rows[:, None] * WIDTH + element[None, :]
    codes = tl.load(codes_ptrs, eviction_policy="evict_first")
    output = (tile_n * _TILE_N + rows)[:, None]
    out_rows = out_ptr + output.to(tl.int64) * num_inputs
    for plane in tl.static_range(16 // BITS):
        column = (tile_k * TILE_K + plane * WIDTH + element)[None, :]
        in_bounds = (output < num_outputs) & (column < num_inputs)
        group = column // GROUP * group_stride + output
        minimum_ptrs = None
        if minimums_ptr is not None:
            minimum_ptrs = minimums_ptr + group
        scale_ptrs = scales_ptr + (2 * group if PAIRS else group)
        numbers = _numbers(codes, scale_ptrs, minimum_ptrs, zero_point, codebook_ptr, in_bounds, plane, BITS, PAIRS)
        tl.store(out_rows + column, numbers.to(out_ptr.dtype.element_ty), mask=in_bounds)


@triton.jit(do_not_specialize=["tiles_k", "zero_point"])
def grouped_embedding_kernel(
    token_ids_ptr,  # int64 [num_tokens]
    codes_ptr,
    scales_ptr,
    minimums_ptr,  # or None
    codebook_ptr,  # or None
    out_ptr,  # [num_tokens, K] contiguous
    num_inputs,
    group_stride,
    tiles_k,
    zero_point,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,  # of inputs, of a program
):
    """Programs: (token, TILES tiles of a row)."""
    wait_for_inputs()
    launch_dependents()
    TILE_K: tl.constexpr = WIDTH * (16 // BITS)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids_ptr + token)
    tile = (tl.program_id(1) * TILES + tl.arange(0, TILES))[:, None]
    element = tl.arange(0, WIDTH)[None, :]
    first_tile = row // _TILE_N * tiles_k
    codes_ptrs = codes_ptr + (first_tile + tile) * (_TILE_N * WIDTH) + row % _TILE_N * WIDTH + element
    codes = tl.load(codes_ptrs, mask=(tile < tiles_k) & (element < WIDTH), other=0)
    for plane in tl.static_range(16 // BITS):
        column = tile * TILE_K + plane * WIDTH + element
        in_bounds = column < num_inputs
        group = column // GROUP * group_stride + row
        minimum_ptrs = None
        if minimums_ptr is not None:
            minimum_ptrs = minimums_ptr + group
        scale_ptrs = scales_ptr + (2 * group if PAIRS else group)
        numbers = _numbers(codes, scale_ptrs, minimum_ptrs, zero_point, codebook_ptr, in_bounds, plane, BITS, PAIRS)
        tl.store(out_ptr + token * num_inputs + column, numbers.to(out_ptr.dtype.element_ty), mask=in_bounds)


@triton.jit
def gather_columns_kernel(
    x_ptr,  # [num_tokens, size], rows contiguous
    columns_ptr,  # int32 [size]
    out_ptr,  # [num_tokens, size] contiguous
    size,
    x_stride,
    TILE: tl.constexpr,
):
    """Programs: (token, TILE columns)."""
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < size
    column = tl.load(columns_ptr + offsets, mask=mask, other=0)
    tl.store(out_ptr + token * size + offsets, tl.load(x_ptr + token * x_stride + column, mask=mask), mask=mask)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    codebook: Tensor | None,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    zero_point: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns [N, K] of a packed weight's tensors, its inputs in the order of the codes."""
    num_outputs, num_inputs = shape
    out = codes.new_empty(shape, dtype=dtype)
    tiles_n, tiles_k = codes.shape[:2]
    grouped_dequantize_kernel[(tiles_n * tiles_k,)](
        codes,
        scales,
        minimums,
        codebook,
        out,
        num_outputs,
        num_inputs,
        scales.shape[1],
        tiles_k,
        zero_point,
        **_constants(bits, group_size, scales.dim() == 3),
        num_warps=4,
    )
    return out


def embed(
    token_ids: Tensor,
    codes: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    codebook: Tensor | None,
    row_size: int,
    bits: int,
    group_size: int,
    zero_point: int,
    dtype: torch.dtype,
) -> Tensor:
    """Looks up token_ids int64 [num_tokens] -> those rows [num_tokens, row_size]"""
    out = codes.new_empty((token_ids.shape[0], row_size), dtype=dtype)
    tiles_k = codes.shape[1]
    grouped_embedding_kernel[(token_ids.shape[0], -(-tiles_k // _EMBEDDING_TILES))](
        token_ids,
        codes,
        scales,
        minimums,
        codebook,
        out,
        row_size,
        scales.shape[1],
        tiles_k,
        zero_point,
        **_constants(bits, group_size, scales.dim() == 3),
        TILES=_EMBEDDING_TILES,
        num_warps=2,
        **dependent_launch(token_ids.device),
    )
    return out


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Computes x [num_tokens, size], columns int32 [size] -> x[:, columns]"""
    num_tokens, size = x.shape
    out = x.new_empty(num_tokens, size)
    gather_columns_kernel[(num_tokens, -(-size // _GATHER_TILE))](
        x, columns, out, size, x.stride(0), TILE=_GATHER_TILE, num_warps=4, **dependent_launch(x.device)
    )
    return out


def _constants(bits: int, group_size: int, pairs: bool) -> dict[str, Any]:
    return {"BITS": bits, "GROUP": group_size, "PAIRS": pairs, "WIDTH": tile_width(group_size)}


_TYPES = {
    "token_ids_ptr": "*i64",
    "codes_ptr": "*i16",
    "scales_ptr": "",
    "minimums_ptr": "",
    "codebook_ptr": "*fp32",
    "out_ptr": "",
    "num_outputs": "i32",
    "num_inputs": "i32",
    "group_stride": "i32",
    "tiles_k": "i32",
    "zero_point": "i32",
}


def specialization(
    kernel: Any,
    dtype: str,
    scale_dtype: str,
    bits: int,
    group_size: int,
    *,
    zeros: bool = False,
    minimums: bool = False,
    codebook: bool = False,
) -> Specialization:
    """Returns what `dequantize` and `embed` compile. kernel: one of this module's two. Types as Triton names them."""
    types = _TYPES | {"scales_ptr": f"*{scale_dtype}", "minimums_ptr": f"*{scale_dtype}", "out_ptr": f"*{dtype}"}
    constants = _constants(bits, group_size, zeros)
    constants |= {name: None for name, there in (("minimums_ptr", minimums), ("codebook_ptr", codebook)) if not there}
    if kernel is grouped_embedding_kernel:
        constants["TILES"] = _EMBEDDING_TILES
    present = {name: types[name] for name in kernel.arg_names if name in types and name not in constants}
    num_warps = 2 if kernel is grouped_embedding_kernel else 4
    return Specialization(kernel, present, constants, num_warps, 2)


def gather_specialization(dtype: str) -> Specialization:
    """Returns what `gather_columns` compiles."""
    types = {"x_ptr": f"*{dtype}", "columns_ptr": "*i32", "out_ptr": f"*{dtype}", "size": "i32", "x_stride": "i32"}
    return Specialization(gather_columns_kernel, types, {"TILE": _GATHER_TILE}, 4, 2)
