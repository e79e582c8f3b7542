"""The ops add_rms_norm, norm_add_rms_norm and rms_norm_ on CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

# Below this, rows do not fill a GPU: each gets as many threads as can load 16 bytes, for the shortest time of one.
# Above, fewer threads with more loads each let more rows be in flight between the reductions' barriers.
MANY_ROWS = 512
MAX_SIZE = 32768


@triton.jit
def _normed(x, weight, eps, SIZE: tl.constexpr, weight_dtype: tl.constexpr):
    """x / sqrt(mean(x²) + eps) * weight in fp32, rounded to weight_dtype before the product as in the reference."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    return (x * scale).to(weight_dtype).to(tl.float32) * weight


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,  # [num_tokens, SIZE] contiguous, as is out
    updated_ptr,  # as residual, which it may be: becomes the sum
    x_weight_ptr,  # or None: x is added as it is
    weight_ptr,
    out_ptr,
    x_token_stride,
    eps,
    SIZE: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, triton.next_power_of_2(SIZE))
    mask = offsets < SIZE
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    weight_dtype: tl.constexpr = weight_ptr.dtype.element_ty
    stream_dtype: tl.constexpr = residual_ptr.dtype.element_ty
    normed_dtype: tl.constexpr = weight_dtype if weight_dtype == stream_dtype else tl.float32
    wait_for_inputs()
    launch_dependents()
    # x is not read again: evicted first, it leaves the L2 cache to what the next kernels read.
    x = tl.load(x_ptr + token * x_token_stride + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
    before = tl.load(residual_ptr + token * SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
    if x_weight_ptr is not None:
        x_weight = tl.load(x_weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = _normed(x.to(tl.float32), x_weight, eps, SIZE, weight_dtype).to(dtype)
    total = before + x.to(tl.float32)
    # The sum is rounded to the residual's dtype before it is normalised, as in the reference.
    rounded = total.to(residual_ptr.dtype.element_ty)
    tl.store(updated_ptr + token * SIZE + offsets, rounded, mask=mask)
    normed = _normed(rounded.to(tl.float32), weight, eps, SIZE, normed_dtype)
    tl.store(out_ptr + token * SIZE + offsets, normed.to(dtype), mask=mask)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `reference.add_rms_norm`; x [num_tokens, size] may have any stride between rows, residual is
    contiguous."""
    return _launch(x, residual, residual, None, weight, eps, dtype)


def add_rms_norm_to(x: Tensor, residual: Tensor, updated: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes `add_rms_norm`, but what becomes of residual is written to `updated`, which is like it."""
    return _launch(x, residual, updated, None, weight, eps, None)


def norm_add_rms_norm(
    x: Tensor, residual: Tensor, x_weight: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Computes `reference.norm_add_rms_norm`; strides as in `add_rms_norm`."""
    assert x_weight.shape == weight.shape, "both weights must be [size]"
    assert x_weight.dtype == weight.dtype, "both weights must have one dtype"
    assert x_weight.is_contiguous(), "both weights must be contiguous"
    return _launch(x, residual, residual, x_weight, weight, eps, dtype)


def _launch(
    x: Tensor,
    residual: Tensor,
    updated: Tensor,
    x_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None,
) -> Tensor:
    assert dtype in (None, x.dtype), "the result has x's dtype"
    num_tokens, size = x.shape
    assert size <= MAX_SIZE, f"a row has at most {MAX_SIZE} elements"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    assert residual.shape == x.shape, "residual must have x's shape"
    assert residual.dtype in (x.dtype, torch.float32), "residual must have x's dtype, or fp32"
    assert residual.is_contiguous(), "residual must be contiguous"
    assert updated.shape == residual.shape and updated.dtype == residual.dtype, "updated must be like residual"
    assert updated.is_contiguous(), "updated must be contiguous"
    assert weight.shape == (size,), "weight must be [size]"
    assert weight.is_contiguous(), "weight must be contiguous"
    out = x.new_empty(x.shape)
    if num_tokens == 0:
        return out
    constants, num_warps = row_constants(size, num_tokens >= MANY_ROWS)
    add_rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        updated,
        x_weight,
        weight,
        out,
        x.stride(0),
        eps,
        **constants,
        num_warps=num_warps,
        **dependent_launch(x.device),
    )
    return out


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    x_token_stride,
    eps,
    SIZE: tl.constexpr,
):
    """One program per token, in place."""
    offsets = tl.arange(0, triton.next_power_of_2(SIZE))
    mask = offsets < SIZE
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs()
    launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = x_ptr + tl.program_id(0).to(tl.int64) * x_token_stride + offsets
    x = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    tl.store(row, _normed(x, weight, eps, SIZE, weight_ptr.dtype.element_ty).to(dtype), mask=mask)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Computes `reference.rms_norm_`; x [num_tokens, size] may have any stride between rows."""
    num_tokens, size = x.shape
    assert size <= MAX_SIZE, f"a row has at most {MAX_SIZE} elements"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    assert weight.shape == (size,), "weight must be [size]"
    assert weight.is_contiguous(), "weight must be contiguous"
    if num_tokens == 0:
        return
    constants, num_warps = row_constants(size, num_tokens >= MANY_ROWS)
    rms_norm_kernel[(num_tokens,)](
        x, weight, x.stride(0), eps, **constants, num_warps=num_warps, **dependent_launch(x.device)
    )


@lru_cache
def row_constants(size: int, many_rows: bool) -> tuple[dict[str, Any], int]:
    """Returns what kernels with a program per row of `size` elements are launched with: constants, num_warps."""
    # Elements per thread: 8 of 2 bytes are one 16-byte load.
    warps = triton.next_power_of_2(size) // (32 * (32 if many_rows else 8))
    return {"SIZE": size}, min(32, max(1, warps))


def specialization(
    dtype: str,
    size: int,
    many_rows: bool = True,
    weight_dtype: str | None = None,
    norms_x: bool = False,
    residual_dtype: str | None = None,
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `add_rms_norm` launches (kernel, argument types, constants, num_warps), to compile it ahead of time.

    dtype is Triton's name of x's type, and that of the weights and the residual unless theirs say otherwise; many_rows
    says whether there are MANY_ROWS or more; norms_x: `norm_add_rms_norm` instead.
    """
    weight_dtype = weight_dtype or dtype
    types = {
        "x_ptr": f"*{dtype}",
        "residual_ptr": f"*{residual_dtype or dtype}",
        "updated_ptr": f"*{residual_dtype or dtype}",
        "x_weight_ptr": f"*{weight_dtype}",
        "weight_ptr": f"*{weight_dtype}",
        "out_ptr": f"*{dtype}",
        "x_token_stride": "i32",
        "eps": "fp32",
    }
    constants, num_warps = row_constants(size, many_rows)
    if not norms_x:
        types.pop("x_weight_ptr")
        constants = {**constants, "x_weight_ptr": None}
    return add_rms_norm_kernel, types, constants, num_warps


def in_place_specialization(
    dtype: str, size: int, many_rows: bool = True
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `rms_norm_` launches, as `specialization`."""
    types = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "x_token_stride": "i32", "eps": "fp32"}
    return rms_norm_kernel, types, *row_constants(size, many_rows)
