"""Floats as integers that compare alike, for searches by bisection."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_ordered(value):
    """Returns int32 that compares as the floats do (not NaN); both zeros are 0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_ordered(number):
    bits = tl.where(number < 0, number ^ 0x7FFFFFFF, number)
    return bits.to(tl.float32, bitcast=True)
