"""silu_and_mul and gelu_tanh_and_mul on CUDA."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gated_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr):
    """Program (row, i): TILE elements of a row of x [rows, 2 * SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < SIZE
    gate = tl.load(x_ptr + row * (2 * SIZE) + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * SIZE) + SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
    # gelu(x), tanh approximation, is x * sigmoid(2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
    argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    result = gate * tl.sigmoid(argument) * up
    tl.store(out_ptr + row * SIZE + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """As `reference.silu_and_mul`."""
    return _launch(x, gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """As `reference.gelu_tanh_and_mul`."""
    return _launch(x, gelu=True)


def _launch(x: Tensor, gelu: bool) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    rows = out.numel() // size
    if rows == 0:
        return out
    tile = min(1024, triton.next_power_of_2(size))
    gated_kernel[(rows, triton.cdiv(size, tile))](x, out, SIZE=size, TILE=tile, GELU=gelu)
    return out
