"""rms_norm and add_rms_norm on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,  # [outer, SIZE] contiguous with inner == 1; read and written only if HAS_RESIDUAL
    weight_ptr,
    out_ptr,  # [outer, inner, SIZE] contiguous
    inner,
    outer_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program per row of SIZE elements."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, SIZE_PADDED)
    mask = offsets < SIZE
    dtype = out_ptr.dtype.element_ty
    source = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
    x = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = residual_ptr + row * SIZE + offsets
        # The sum is rounded to the residual's dtype before it is normalised, as in the reference.
        total = (x + tl.load(residual, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual, total, mask=mask)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normed = (x * scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + offsets, (normed * weight).to(dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`; x [..., size] is contiguous, or a 2- or 3-dimensional view with contiguous rows."""
    size = x.shape[-1]
    if x.is_contiguous():
        return _launch(x, None, weight, eps, 1, size, size)
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        return rms_norm(x.contiguous(), weight, eps)
    if x.dim() == 2:
        return _launch(x, None, weight, eps, 1, x.stride(0), size)
    return _launch(x, None, weight, eps, x.shape[1], x.stride(0), x.stride(1))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.add_rms_norm`; residual is contiguous, of x's shape."""
    assert residual.is_contiguous(), "residual must be contiguous"
    assert residual.shape == x.shape, "residual must have x's shape"
    size = x.shape[-1]
    return _launch(x.contiguous(), residual, weight, eps, 1, size, size)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    inner: int,
    outer_stride: int,
    inner_stride: int,
) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    rows = out.numel() // size
    if rows == 0:
        return out
    size_padded = triton.next_power_of_2(size)
    rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        inner,
        outer_stride,
        inner_stride,
        eps,
        SIZE=size,
        SIZE_PADDED=size_padded,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, size_padded // 256)),
    )
    return out
