"""A product's inputs from the residual stream: the addition to the stream and the norm without separate launches.

(r / s * w) @ W.T = (r * w) @ W.T / s: each program adds and multiplies the inputs that it reads anyway, and scales its
sums at the end, when it knows the sum of the squares, from which s follows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl

# r * w may be larger than fp16 holds, which a part of it is not: 1/64 costs no bits of any number that matters.
_PART = tl.constexpr(1 / 64)


# Elements of the stream that a program updates at once.
_TILE = tl.constexpr(256)


class Norm(NamedTuple):
    """The residual stream that x is added to, and the norm of the sum before it is multiplied."""

    residual: Tensor  # [num_tokens, K] contiguous, of x's dtype or fp32
    updated: Tensor  # as residual, and not the same memory: becomes residual + x
    weight: Tensor  # [K], of x's dtype or fp32
    eps: float

    def check(self, x: Tensor) -> None:
        for stream in (self.residual, self.updated):
            assert stream.shape == x.shape and stream.is_contiguous(), "residual and updated are contiguous, as x"
            assert stream.dtype in (x.dtype, torch.float32), "residual and updated have x's dtype, or fp32"
        assert self.residual.dtype == self.updated.dtype, "residual and updated have one dtype"
        assert self.residual.data_ptr() != self.updated.data_ptr(), "programs read residual while others write updated"
        assert self.weight.shape == (x.shape[1],) and self.weight.is_contiguous(), "the norm's weight is [K]"


@triton.jit
def normed_inputs(
    x,  # [inputs, BLOCK_M]
    residual,  # as x
    norm,  # [inputs]
    squares,  # fp32, as x
    dtype: tl.constexpr,
):
    """Returns the factor of the weight, in dtype, and the squares so far, for `normed_sums`."""
    total = added(x, residual).to(tl.float32)
    return (total * (norm.to(tl.float32) * _PART)[:, None]).to(dtype), squares + total * total


@triton.jit
def added(x, residual):
    """The stream, rounded as `add_rms_norm` has it."""
    return (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)


@triton.jit
def normed_sums(sums, squares, num_inputs, eps):
    """The product [outputs, BLOCK_M] of the norm; squares [BLOCK_M]: their sums over all inputs."""
    return sums * (tl.rsqrt(squares / num_inputs + eps) / _PART)[None, :]


@triton.jit
def load_piece(x_ptr, residual_ptr, num_tokens, num_inputs, x_stride, piece):
    """Returns the sum of x and the stream: loaded before a product, it is stored after it, when no other program
    waits for it.

    All programs together update the stream, each every so manyth piece.
    """
    row = (piece % num_tokens).to(tl.int64)
    columns = piece // num_tokens * _TILE + tl.arange(0, _TILE)
    mask = columns < num_inputs
    return (
        tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0),
        tl.load(residual_ptr + row * num_inputs + columns, mask=mask, other=0.0),
    )


@triton.jit
def store_piece(x, residual, updated_ptr, num_tokens, num_inputs, piece):
    columns = piece // num_tokens * _TILE + tl.arange(0, _TILE)
    target = updated_ptr + (piece % num_tokens).to(tl.int64) * num_inputs + columns
    tl.store(target, added(x, residual), mask=columns < num_inputs)


@triton.jit
def store_other_pieces(x_ptr, residual_ptr, updated_ptr, num_tokens, num_inputs, x_stride, piece, programs):
    """Prefetches the tiles after a program's first one, where programs are few."""
    for other in tl.range(piece + programs, tl.cdiv(num_inputs, _TILE) * num_tokens, programs):
        x, residual = load_piece(x_ptr, residual_ptr, num_tokens, num_inputs, x_stride, other)
        store_piece(x, residual, updated_ptr, num_tokens, num_inputs, other)
