"""Attention without a cache in Triton's interpreter, against the reference. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.encoder

in a process of its own, because Triton reads the variable when a kernel is defined. fp32 and fp16 only: the
interpreter multiplies bf16 bit patterns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pagewire.kernels import reference
from pagewire.kernels.triton.encoder import encoder_attention, rotate
from tests.kernels.batches import EncoderBatch
from tests.kernels.triton.interpreted import run_cases

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}


def attention_case(lengths: list[int], window: int = 0, **form: Any) -> None:
    batch = EncoderBatch.of(lengths, **form)
    actual = encoder_attention.encoder_attention(*batch.args(window))
    expected = reference.encoder_attention(*batch.args(window))
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def rotate_case(dtype: torch.dtype, num_heads: int, head_dim: int, rotary_dim: int) -> None:
    """Bits equal the reference's; the heads lie among others."""
    rows = torch.randn(5, num_heads + 3, head_dim).to(dtype)
    expected = rows.clone()
    positions, cos_sin = torch.tensor([3, 0, 9, 9, 1]), torch.randn(10, rotary_dim)
    rotate.rotate(positions, rows[:, :num_heads], cos_sin)
    reference.rotate(positions, expected[:, :num_heads], cos_sin)
    assert torch.equal(rows, expected)


F16 = torch.float16
CASES: dict[str, Callable[[], None]] = {
    "ragged": partial(attention_case, [5, 0, 70, 1, 33]),
    "ragged, fp16, shared heads": partial(attention_case, [130, 3], num_heads=4, num_kv_heads=2, dtype=F16),
    "heads of 40": partial(attention_case, [20, 50], head_dim=40),
    "window": partial(attention_case, [90, 7], 11),
    "window of one token, fp16": partial(attention_case, [150], 1, dtype=F16),
    "rotate": partial(rotate_case, torch.float32, 6, 64, 64),
    "rotate, fp16, part of many heads": partial(rotate_case, F16, 11, 80, 32),
}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, {}))
