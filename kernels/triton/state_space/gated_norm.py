"""The op gated_rms_norm on CUDA."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.elementwise.norm import MANY_ROWS, row_constants


@triton.jit(do_not_specialize=["eps"])
def gated_rms_norm_kernel(
    x_ptr,  # [num_tokens, GROUPS * SIZE]
    gate_ptr,
    weight_ptr,  # [GROUPS * SIZE]
    out_ptr,  # [num_tokens, GROUPS * SIZE]
    x_stride,
    gate_stride,
    eps,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Program (token, group)."""
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, triton.next_power_of_2(SIZE))
    mask = offsets < SIZE
    columns = tl.program_id(1) * SIZE + offsets
    x = tl.load(x_ptr + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    gated = x * gate * tl.sigmoid(gate)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    normed = (gated * tl.rsqrt(tl.sum(gated * gated, axis=0) / SIZE + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * (GROUPS * SIZE) + columns, (normed * weight).to(dtype), mask=mask)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """Computes `reference.gated_rms_norm`; x and gate may have any stride between tokens."""
    num_tokens, size = x.shape
    assert gate.shape == x.shape and weight.shape == (size,), "gate and weight must have x's shape"
    assert size % group_size == 0, "rows must consist of groups"
    assert x.stride(1) == gate.stride(1) == 1 and weight.is_contiguous(), "the last dimension must be contiguous"
    out = x.new_empty(x.shape)
    if num_tokens == 0:
        return out
    groups = size // group_size
    constants, num_warps = row_constants(group_size, num_tokens * groups >= MANY_ROWS)
    gated_rms_norm_kernel[(num_tokens, groups)](
        x,
        gate,
        weight,
        out,
        x.stride(0),
        gate.stride(0),
        eps,
        **constants,
        GROUPS=groups,
        num_warps=num_warps,
        **dependent_launch(x.device),
    )
    return out


def specialization(
    dtype: str, group_size: int, groups: int, many_rows: bool
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `gated_rms_norm` launches (kernel, argument types, constants, num_warps); many_rows: MANY_ROWS or
    more."""
    types = {
        **dict.fromkeys(("x_ptr", "gate_ptr", "weight_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("x_stride", "gate_stride"), "i32"),
        "eps": "fp32",
    }
    constants, num_warps = row_constants(group_size, many_rows)
    return gated_rms_norm_kernel, types, {**constants, "GROUPS": groups}, num_warps
