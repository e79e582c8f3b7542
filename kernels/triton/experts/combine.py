"""The op combine_experts on CUDA."""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization

_TILE = 1024  # columns


@triton.jit
def combine_experts_kernel(
    y_ptr,  # [num_tokens * TOP_K, size]
    weights_ptr,  # fp32 [num_tokens, TOP_K]
    out_ptr,  # [num_tokens, size]
    row_stride,  # size
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (token, tile of columns)."""
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < row_stride
    total = tl.zeros([TILE], dtype=tl.float32)
    for pair in range(token * TOP_K, (token + 1) * TOP_K):
        weight = tl.load(weights_ptr + pair)
        y = tl.load(y_ptr + pair * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        # What counts 0 may be no number.
        total += tl.where(weight != 0.0, weight * y, 0.0)
    tl.store(out_ptr + token * row_stride + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def combine_experts(y: Tensor, weights: Tensor) -> Tensor:
    """Computes `reference.combine_experts`."""
    num_tokens, top_k = weights.shape
    size = y.shape[1]
    assert y.shape[0] == num_tokens * top_k, "y must have a row per pair"
    assert y.is_contiguous() and weights.is_contiguous(), "y and weights must be contiguous"
    out = y.new_empty(num_tokens, size)
    if num_tokens > 0:
        grid = (num_tokens, triton.cdiv(size, _TILE))
        combine_experts_kernel[grid](
            y, weights, out, size, TOP_K=top_k, TILE=_TILE, num_warps=4, **dependent_launch(y.device)
        )
    return out


def specialization(dtype: str, top_k: int) -> Specialization:
    """Returns what `combine_experts` launches, to compile it ahead of time; dtype is Triton's name of y's type."""
    types = {"y_ptr": f"*{dtype}", "weights_ptr": "*fp32", "out_ptr": f"*{dtype}", "row_stride": "i32"}
    return Specialization(combine_experts_kernel, types, {"TOP_K": top_k, "TILE": _TILE}, num_warps=4, num_stages=2)
