"""Activations to codes and fp8 weights to numbers, in Triton's interpreter on the CPU. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.quantize_input

in a process of its own, because Triton reads the variable when a kernel is defined.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels.quantized.weights import Fp8Weight
from pagewire.kernels.triton.products import fp8_weights, quantize_input
from tests.kernels.triton.interpreted import run_cases

F32, F16, FP8, INT8 = torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8
NAN = float("nan")


def tokens_of(num_tokens: int, size: int, dtype: torch.dtype = F32) -> Tensor:
    """Strided rows of different magnitudes; NaN between them."""
    rows = torch.full((num_tokens, size + 8), NAN, dtype=dtype)
    rows[:, :size] = torch.randn(num_tokens, size) * torch.logspace(-2, 1, num_tokens)[:, None]
    return rows[:, :size]


def fp8_weight(num_outputs: int, num_inputs: int, blocks: bool) -> tuple[Tensor, Tensor]:
    """Subnormals and the largest number included."""
    weight = torch.randn(num_outputs, num_inputs) * 0.5
    weight.view(-1)[:3] = torch.tensor([448.0, 2.0**-9, -0.0])
    shape = (-(-num_outputs // 128), -(-num_inputs // 128)) if blocks else (num_outputs,)
    return weight.to(FP8), torch.rand(shape) * 0.02 + 0.001


def assert_codes(codes: Tensor, scales: Tensor, x: Tensor, limit: float, fixed: bool) -> None:
    """Computes x [rows, size] of one scale each."""
    x = x.float()
    if not fixed:
        expected_scales = (x.abs().amax(-1) / limit).clamp(min=1e-12)
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0)
    quotient = x / scales[:, None]
    if codes.dtype == INT8:
        expected = quotient.round().clamp(-128 if fixed else -127, 127).to(INT8)
    else:
        expected = quotient.clamp(-448, 448).to(FP8)
    different = (codes.view(torch.uint8) != expected.view(torch.uint8)).sum()
    assert different == 0, f"{different} codes differ"


def tokens_case(size: int, dtype: torch.dtype, code: torch.dtype, fixed: float | None = None) -> None:
    x = tokens_of(5, size, dtype)
    x[1] = 0
    x[2, -1] = 60000.0
    input_scale = None if fixed is None else torch.tensor([fixed])
    codes, scales = quantize_input.quantize_tokens(x, input_scale, code)
    assert_codes(codes, scales, x, 127.0 if code == INT8 else 448.0, fixed is not None)


def groups_case(size: int, dtype: torch.dtype) -> None:
    x = tokens_of(5, size, dtype)
    x[1, :128] = 0
    codes, scales = quantize_input.quantize_groups(x)
    for group, start in enumerate(range(0, size, 128)):
        part = slice(start, start + 128)
        assert_codes(codes[:, part].contiguous(), scales[group], x[:, part], 448.0, fixed=False)


def ties_case() -> None:
    """Quotients half-way between two codes go to the even one; none is missed by a product with the reciprocal."""
    halves = torch.arange(-127.5, 128.5) * 0.7
    for code in (INT8, FP8):
        codes, scales = quantize_input.quantize_tokens(halves[None], torch.tensor([0.7]), code)
        assert_codes(codes, scales, halves[None], 0.0, fixed=True)


def decode_case() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)
    numbers = codes.float()
    weight = codes.reshape(16, 16)[:13].contiguous()  # no NaN with the upper sign bit; rows and columns are ragged
    for blocks in (False, True):
        scales = torch.rand(1, 1) if blocks else torch.rand(13)
        expected = Fp8Weight(weight, scales).dequantize()
        actual = fp8_weights.dequantize(weight, scales, F32)
        finite = expected.isfinite()
        assert torch.equal(actual[finite], expected[finite])
    assert numbers.isfinite().sum() == 254


def dequantize_case(num_outputs: int, num_inputs: int, blocks: bool) -> None:
    weight, scales = fp8_weight(num_outputs, num_inputs, blocks)
    for dtype in (F32, F16):
        actual = fp8_weights.dequantize(weight, scales, dtype)
        assert torch.equal(actual, Fp8Weight(weight, scales).dequantize().to(dtype))


CASES: dict[str, Callable[[], None]] = {
    "tokens to int8": partial(tokens_case, 300, F32, INT8),
    "tokens to int8 by a fixed scale": partial(tokens_case, 64, F16, INT8, 0.03),
    "tokens to fp8": partial(tokens_case, 1000, F16, FP8),
    "tokens to fp8 by a fixed scale": partial(tokens_case, 7, F32, FP8, 0.004),
    "tokens to fp8, longer than a tile": partial(tokens_case, quantize_input.MAX_TILE + 77, F32, FP8),
    "tokens to int8, longer than two tiles": partial(tokens_case, 2 * quantize_input.MAX_TILE + 1, F16, INT8),
    "groups": partial(groups_case, 128 * 3 + 5, F32),
    "groups of several programs": partial(groups_case, quantize_input.GROUPED_TILE + 200, F16),
    "ties": ties_case,
    "decoding": decode_case,
    "dequantize": partial(dequantize_case, 33, 300, blocks=False),
    "dequantize blocks": partial(dequantize_case, 130, 300, blocks=True),
}


if __name__ == "__main__":
    sys.exit(run_cases(CASES))
