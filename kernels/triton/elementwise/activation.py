"""silu_and_mul and gelu_tanh_and_mul on CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

import triton
import triton.language as tl

# One 16-byte load of gate and one of up per thread of 4 warps, for 2-byte elements.
MAX_TILE = 1024


@triton.jit
def gated_kernel(
    x_ptr,  # [num_tokens, 2 * SIZE]: gate, up
    out_ptr,  # [num_tokens, SIZE] contiguous
    x_token_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GELU: tl.constexpr,
):
    """Program (token, i): elements i * TILE .. of one token."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < SIZE
    source = x_ptr + token * x_token_stride + offsets
    # Neither is read again: evicted first, they leave the L2 cache to the result, which the next kernel reads.
    gate = tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    # gelu(x), tanh approximation, is x * sigmoid(2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
    argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    result = gate * tl.sigmoid(argument) * up
    tl.store(out_ptr + token * SIZE + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """As `reference.silu_and_mul`; x may have any stride between rows."""
    return _launch(x, gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """As `reference.gelu_tanh_and_mul`; x may have any stride between rows."""
    return _launch(x, gelu=True)


def _launch(x: Tensor, gelu: bool) -> Tensor:
    num_tokens, width = x.shape
    assert width % 2 == 0, "a row of x is as many gates as ups"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    size = width // 2
    out = x.new_empty((num_tokens, size))
    if num_tokens == 0:
        return out
    constants, num_warps = _constants(size, gelu)
    grid = (num_tokens, triton.cdiv(size, constants["TILE"]))
    gated_kernel[grid](x, out, x.stride(0), **constants, num_warps=num_warps)
    return out


@lru_cache
def _constants(size: int, gelu: bool) -> tuple[dict[str, Any], int]:
    tile = min(MAX_TILE, triton.next_power_of_2(size))
    return {"SIZE": size, "TILE": tile, "GELU": gelu}, max(1, tile // 256)


def specialization(dtype: str, size: int, gelu: bool = False) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """What the activations launch (kernel, argument types, constants, num_warps), to compile it ahead of time.

    dtype is Triton's name of x's type, size that of the result's rows.
    """
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "x_token_stride": "i32"}
    return gated_kernel, types, *_constants(size, gelu)
