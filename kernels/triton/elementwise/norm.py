"""add_rms_norm on CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

import triton
import triton.language as tl

# Below this, rows do not fill a GPU: each gets as many threads as can load 16 bytes, for the shortest time of one.
# Above, fewer threads with more loads each let more rows be in flight between the reductions' barriers.
MANY_ROWS = 512
MAX_SIZE = 32768


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,  # [num_tokens, SIZE] contiguous, as is out
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
    residual = residual_ptr + token * SIZE + offsets
    # x is not read again: evicted first, it leaves the L2 cache to what the next kernels read.
    x = tl.load(x_ptr + token * x_token_stride + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
    total = tl.load(residual, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)
    # Before the reduction, so that the load does not wait for it.
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    # The sum is rounded to the residual's dtype before it is normalised, as in the reference.
    rounded = total.to(dtype)
    tl.store(residual, rounded, mask=mask)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    normed = (total * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * SIZE + offsets, (normed * weight).to(dtype), mask=mask)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.add_rms_norm`; x [num_tokens, size] may have any stride between rows, residual is contiguous."""
    num_tokens, size = x.shape
    assert size <= MAX_SIZE, f"a row has at most {MAX_SIZE} elements"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    assert residual.shape == x.shape, "residual must have x's shape"
    assert residual.dtype == x.dtype, "residual must have x's dtype"
    assert residual.is_contiguous(), "residual must be contiguous"
    assert weight.shape == (size,), "weight must be [size]"
    assert weight.is_contiguous(), "weight must be contiguous"
    out = residual.new_empty(residual.shape)
    if num_tokens == 0:
        return out
    constants, num_warps = _constants(size, num_tokens >= MANY_ROWS)
    add_rms_norm_kernel[(num_tokens,)](x, residual, weight, out, x.stride(0), eps, **constants, num_warps=num_warps)
    return out


@lru_cache
def _constants(size: int, many_rows: bool) -> tuple[dict[str, Any], int]:
    # Elements per thread: 8 of 2 bytes are one 16-byte load.
    warps = triton.next_power_of_2(size) // (32 * (32 if many_rows else 8))
    return {"SIZE": size}, min(32, max(1, warps))


def specialization(dtype: str, size: int, many_rows: bool = True) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """What `add_rms_norm` launches (kernel, argument types, constants, num_warps), to compile it ahead of time.

    dtype is Triton's name of x's type; many_rows says whether there are MANY_ROWS or more.
    """
    types = {
        "x_ptr": f"*{dtype}",
        "residual_ptr": f"*{dtype}",
        "weight_ptr": f"*{dtype}",
        "out_ptr": f"*{dtype}",
        "x_token_stride": "i32",
        "eps": "fp32",
    }
    return add_rms_norm_kernel, types, *_constants(size, many_rows)
