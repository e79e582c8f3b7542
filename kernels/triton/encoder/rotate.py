"""The op rotate on CUDA: rotary embedding of heads that go to no cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl

HEADS = 8  # of a program


@triton.jit
def rotate_kernel(
    positions_ptr,
    heads_ptr,  # [num_tokens, NUM_HEADS, head_dim], heads contiguous
    cos_sin_ptr,  # fp32 [max_position, 2 * HALF]
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (token, i): heads i * HEADS .. of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    in_half = dims < HALF
    cos_sin = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF) + dims
    cos = tl.load(cos_sin, mask=in_half, other=0.0)
    sin = tl.load(cos_sin + HALF, mask=in_half, other=0.0)
    mask = (heads < NUM_HEADS) & in_half
    pointers = heads_ptr + token * token_stride + heads * head_stride + dims
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    tl.store(pointers, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(pointers + HALF, (second * cos + first * sin).to(dtype), mask=mask)


def rotate(positions: Tensor, heads: Tensor, cos_sin_cache: Tensor) -> None:
    """Computes `reference.rotate`."""
    num_tokens, num_heads, _ = heads.shape
    assert heads.stride(2) == 1, "heads must be contiguous"
    if num_tokens == 0:
        return
    constants = _constants(num_heads, cos_sin_cache.shape[1])
    grid = (num_tokens, triton.cdiv(num_heads, HEADS))
    rotate_kernel[grid](positions, heads, cos_sin_cache, heads.stride(0), heads.stride(1), **constants, num_warps=4)


def _constants(num_heads: int, rotary_dim: int) -> dict[str, Any]:
    return {"NUM_HEADS": num_heads, "HALF": rotary_dim // 2, "HEADS": HEADS}


def specialization(
    dtype: torch.dtype, num_heads: int, rotary_dim: int
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `rotate` launches, to compile it ahead of time."""
    element = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    types = {
        "positions_ptr": "*i64",
        "heads_ptr": element,
        "cos_sin_ptr": "*fp32",
        "token_stride": "i32",
        "head_stride": "i32",
    }
    return rotate_kernel, types, _constants(num_heads, rotary_dim), 4
