"""The ops layer_norm and add_layer_norm on CUDA."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.elementwise.norm import MANY_ROWS, MAX_SIZE, row_constants


@triton.jit
def layer_norm_kernel(
    x_ptr,
    residual_ptr,  # [num_tokens, SIZE] contiguous, as is out; None: x is normalised as it is
    weight_ptr,
    bias_ptr,  # or None
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
    wait_for_inputs()
    launch_dependents()
    row = tl.load(x_ptr + token * x_token_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = residual_ptr + token * SIZE + offsets
        rounded = (tl.load(residual, mask=mask, other=0.0).to(tl.float32) + row).to(dtype)
        tl.store(residual, rounded, mask=mask)
        row = rounded.to(tl.float32)
    mean = tl.sum(row, axis=0) / SIZE
    centered = tl.where(mask, row - mean, 0.0)
    result = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / SIZE + eps) * weight
    if bias_ptr is not None:
        result += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + offsets, result.to(dtype), mask=mask)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes `reference.layer_norm`; x [num_tokens, size] may have any stride between rows."""
    return _launch(x, None, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes `reference.add_layer_norm`; x may have any stride between rows, residual is contiguous."""
    assert residual.shape == x.shape, "residual must have x's shape"
    assert residual.dtype == x.dtype, "residual must have x's dtype"
    assert residual.is_contiguous(), "residual must be contiguous"
    return _launch(x, residual, weight, bias, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    num_tokens, size = x.shape
    assert size <= MAX_SIZE, f"a row has at most {MAX_SIZE} elements"
    assert x.stride(1) == 1, "the last dimension of x must be contiguous"
    for vector in (weight, bias):
        assert vector is None or (vector.shape == (size,) and vector.is_contiguous()), "weight and bias are [size]"
    out = x.new_empty(x.shape)
    if num_tokens == 0:
        return out
    constants, num_warps = row_constants(size, num_tokens >= MANY_ROWS)
    layer_norm_kernel[(num_tokens,)](
        x, residual, weight, bias, out, x.stride(0), eps, **constants, num_warps=num_warps, **dependent_launch(x.device)
    )
    return out


def specialization(
    dtype: str, size: int, many_rows: bool = True, residual: bool = True, bias: bool = True
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what the ops launch (kernel, argument types, constants, num_warps), to compile it ahead of time.

    dtype is Triton's name of x's type; many_rows says whether there are MANY_ROWS or more.
    """
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "out_ptr")
    types = dict.fromkeys(pointers, f"*{dtype}") | {"x_token_stride": "i32", "eps": "fp32"}
    absent = (() if residual else ("residual_ptr",)) + (() if bias else ("bias_ptr",))
    constants, num_warps = row_constants(size, many_rows)
    present = {name: kind for name, kind in types.items() if name not in absent}
    return layer_norm_kernel, present, {**constants, **dict.fromkeys(absent)}, num_warps
