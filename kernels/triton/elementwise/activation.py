"""Activations, gated and plain, on CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

# One 16-byte load of gate and one of up per thread of 4 warps, for 2-byte elements.
MAX_TILE = 1024


@triton.jit
def _gelu_tanh(x):
    # gelu(x), tanh approximation, is x * sigmoid(2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


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
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < SIZE
    source = x_ptr + token * x_token_stride + offsets
    # Neither is read again: evicted first, they leave the L2 cache to the result, which the next kernel reads.
    gate = tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    activated = _gelu_tanh(gate) if GELU else gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * SIZE + offsets, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gelu_kernel(
    x_ptr,  # [num_tokens, SIZE]
    out_ptr,  # [num_tokens, SIZE] contiguous
    x_token_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TANH: tl.constexpr,  # the approximation
):
    """Program (token, i): elements i * TILE .. of one token."""
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < SIZE
    x = tl.load(x_ptr + token * x_token_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    result = _gelu_tanh(x) if TANH else 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out_ptr + token * SIZE + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["alpha", "limit"])
def clamped_swiglu_kernel(
    x_ptr,  # [num_tokens, 2 * SIZE]: gate, up
    out_ptr,  # [num_tokens, SIZE] contiguous
    x_token_stride,
    alpha,
    limit,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (token, i): elements i * TILE .. of one token."""
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < SIZE
    source = x_ptr + token * x_token_stride + offsets
    gate = tl.minimum(tl.load(source, mask=mask, other=0.0).to(tl.float32), limit)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    product = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    tl.store(out_ptr + token * SIZE + offsets, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `reference.silu_and_mul`; x may have any stride between rows."""
    return _launch(x, dtype, gelu=False)


def gelu_tanh_and_mul(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `reference.gelu_tanh_and_mul`; x may have any stride between rows."""
    return _launch(x, dtype, gelu=True)


def _launch(x: Tensor, dtype: torch.dtype | None, gelu: bool) -> Tensor:
    assert dtype in (None, x.dtype), "the result has x's dtype"
    num_tokens, width = x.shape
    assert width % 2 == 0, "a row of x is as many gates as ups"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    size = width // 2
    out = x.new_empty((num_tokens, size))
    if num_tokens == 0:
        return out
    constants, num_warps = _constants(size, GELU=gelu)
    grid = (num_tokens, triton.cdiv(size, constants["TILE"]))
    gated_kernel[grid](x, out, x.stride(0), **constants, num_warps=num_warps, **dependent_launch(x.device))
    return out


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Computes `reference.clamped_swiglu`; x may have any stride between rows."""
    num_tokens, width = x.shape
    assert width % 2 == 0, "a row of x is as many gates as ups"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    out = x.new_empty((num_tokens, width // 2))
    if num_tokens == 0:
        return out
    constants, num_warps = _constants(width // 2)
    grid = (num_tokens, triton.cdiv(width // 2, constants["TILE"]))
    clamped_swiglu_kernel[grid](
        x, out, x.stride(0), alpha, limit, **constants, num_warps=num_warps, **dependent_launch(x.device)
    )
    return out


def gelu(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `reference.gelu`; x may have any stride between rows."""
    return _launch_plain(x, dtype, tanh=False)


def gelu_tanh(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `reference.gelu_tanh`; x may have any stride between rows."""
    return _launch_plain(x, dtype, tanh=True)


def _launch_plain(x: Tensor, dtype: torch.dtype | None, tanh: bool) -> Tensor:
    assert dtype in (None, x.dtype), "the result has x's dtype"
    num_tokens, size = x.shape
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    out = x.new_empty((num_tokens, size))
    if num_tokens == 0:
        return out
    constants, num_warps = _constants(size, TANH=tanh)
    grid = (num_tokens, triton.cdiv(size, constants["TILE"]))
    gelu_kernel[grid](x, out, x.stride(0), **constants, num_warps=num_warps, **dependent_launch(x.device))
    return out


@lru_cache
def _constants(size: int, **kind: bool) -> tuple[dict[str, Any], int]:
    tile = min(MAX_TILE, triton.next_power_of_2(size))
    return {"SIZE": size, "TILE": tile, **kind}, max(1, tile // 256)


def specialization(dtype: str, size: int, gelu: bool = False) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what the gated activations launch (kernel, argument types, constants, num_warps), to compile it ahead
    of time.

    dtype is Triton's name of x's type, size that of the result's rows.
    """
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "x_token_stride": "i32"}
    return gated_kernel, types, *_constants(size, GELU=gelu)


def plain_specialization(dtype: str, size: int, tanh: bool) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `gelu` and `gelu_tanh` launch, as `specialization`."""
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "x_token_stride": "i32"}
    return gelu_kernel, types, *_constants(size, TANH=tanh)


def clamped_specialization(dtype: str, size: int) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `clamped_swiglu` launches, as `specialization`."""
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "x_token_stride": "i32", "alpha": "fp32", "limit": "fp32"}
    return clamped_swiglu_kernel, types, *_constants(size)
