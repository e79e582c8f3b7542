"""Products of few rows, with norm and activation or without, against the reference. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.skinny

in a process of its own, because Triton reads the variable when a kernel is defined. fp32 and fp16 only: the interpreter
rounds bf16 wrongly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels import reference, tuning
from pagewire.kernels.quantized import GroupedWeight
from pagewire.kernels.quantized.packed import pack_grouped
from pagewire.kernels.triton.products import grouped_skinny, linear, normed_linear, skinny
from tests.kernels.triton.interpreted import run_cases

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
NAN = float("nan")
F32, F16 = torch.float32, torch.float16


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def rows_of(num_tokens: int, size: int, dtype: torch.dtype) -> Tensor:
    """Strided: what lies between rows is NaN."""
    x = torch.full((num_tokens, size + 8), NAN, dtype=dtype)[:, :size]
    return x.copy_(torch.randn(num_tokens, size))


def product_case(dtype: torch.dtype, num_tokens: int, inputs: int, outputs: int, bias: bool = False) -> None:
    x, weight = rows_of(num_tokens, inputs, dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    assert x.is_cuda or linear.skinny_config(x, weight) is not None
    expected = reference.linear(x.float(), weight.float(), None if offset is None else offset.float())
    assert_close(linear.linear(x, weight, offset), expected)
    # The next launch finds the counters at zero, and gives the same.
    assert torch.equal(linear.linear(x, weight, offset), linear.linear(x, weight, offset))


def normed_case(
    dtype: torch.dtype,
    num_tokens: int,
    inputs: int,
    outputs: int,
    *,
    gated: bool = False,
    bias: bool = False,
    scale: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> None:
    """Checks a product. scale: of the stream, which the norm removes again."""
    x = (scale * rows_of(num_tokens, inputs, torch.float32)).to(dtype)
    residual = (scale * torch.randn(num_tokens, inputs)).to(residual_dtype or dtype)
    norm_weight = (1 + torch.randn(inputs)).to(dtype)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    actual_stream, expected_stream = torch.full_like(residual, NAN), torch.empty_like(residual)
    before = residual.clone()
    for _ in range(2):  # the second finds the counters at zero
        actual = normed_linear.normed_linear(x, residual, actual_stream, norm_weight, 1e-5, weight, offset, gated)
    expected = reference.normed_linear(x, residual, expected_stream, norm_weight, 1e-5, weight, offset, gated)
    assert torch.equal(residual, before) and torch.equal(actual_stream, expected_stream)
    assert_close(actual, expected)


def grouped_case(
    dtype: torch.dtype,
    num_tokens: int,
    inputs: int,
    outputs: int,
    *,
    bits: int = 4,
    group: int = 128,
    offsets: str = "zeros",
    gated: bool = False,
    bias: bool = False,
) -> None:
    groups = -(-inputs // group)
    codes = torch.randint(0, 2**bits, (outputs, inputs)).byte()
    scales = (torch.rand(outputs, groups) / inputs**0.5 / 2**bits).half()
    given = {
        "zeros": torch.randint(0, 2**bits, (outputs, groups)).byte(),
        "minimums": (torch.randn(outputs, groups) / inputs**0.5).half(),
        "none": None,
    }[offsets]
    weight = GroupedWeight(codes, bits, group, scales, offsets=given, zero_point=2 ** (bits - 1) * (given is None))
    packed = pack_grouped(weight, "cuda")
    x, residual = rows_of(num_tokens, inputs, dtype), torch.randn(num_tokens, inputs).to(dtype)
    norm_weight = (1 + torch.randn(inputs)).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    assert x.is_cuda or grouped_skinny.grouped_skinny_config(x, outputs, packed.bits, group) is not None
    actual_stream, expected_stream = torch.full_like(residual, NAN), torch.empty_like(residual)
    actual = normed_linear.normed_grouped_linear(
        x, residual, actual_stream, norm_weight, 1e-5, packed.codes, packed.scales, packed.offsets, packed.codebook,
        packed.permutation, offset, outputs, packed.bits, group, packed.zero_point, gated,
    )  # fmt: skip
    dense = weight.dequantize()
    expected = reference.normed_linear(
        x.float(), residual.float(), expected_stream.float(), norm_weight.float(), 1e-5, dense,
        None if offset is None else offset.float(), gated,
    )  # fmt: skip
    reference.add_rms_norm(x, expected_stream.copy_(residual), norm_weight, 1e-5)
    assert torch.equal(actual_stream, expected_stream)
    assert_close(actual, expected)


def many_rows_case() -> None:
    """Checks more rows than have a fused norm, and than have a product of ours."""
    for num_tokens in (skinny.MAX_ROWS + 1, skinny.MAX_ROWS_APART + 1):
        normed_case(F32, num_tokens, 96, 40, gated=True, bias=True)


def table_case() -> None:
    """The least inputs and outputs, where tiles are mostly padding, in every configuration."""
    for entry in tuning.load_table("skinny_product", 90):
        x, weight = torch.randn(entry.shape["tokens"] - 1, 8).half(), torch.randn(2, 8).half()
        actual = skinny.skinny_product(x, weight, None, entry.config, norm=None, gated=False)
        assert_close(actual, x.float() @ weight.float().T)


CASES: dict[str, Callable[[], None]] = {
    "product": partial(product_case, F32, 3, 1024, 136),
    "product fp16, ragged inputs": partial(product_case, F16, 8, 1000, 72, bias=True),
    "product of more rows": partial(product_case, F16, 64, 1000, 136, bias=True),
    "product of rows that fill no tile": partial(product_case, F32, 21, 512, 72),
    "normed": partial(normed_case, F32, 1, 1024, 200, bias=True),
    "normed, gated": partial(normed_case, F32, 5, 640, 2 * 72, gated=True, bias=True),
    "normed, gated, ragged": partial(normed_case, F16, 8, 1000, 2 * 40, gated=True),
    "normed, residual in fp32": partial(normed_case, F16, 2, 256, 64, residual_dtype=F32),
    "normed fp16, near its largest number": partial(normed_case, F16, 2, 256, 64, scale=6000.0),
    "normed, many rows": many_rows_case,
    "grouped, zeros": partial(grouped_case, F32, 3, 1024, 192, bias=True),
    "grouped, zeros, gated": partial(grouped_case, F16, 8, 512, 2 * 104, gated=True, bias=True),
    "grouped, symmetric, gated, ragged": partial(
        grouped_case, F32, 1, 272, 2 * 40, group=16, offsets="none", gated=True
    ),
    "grouped, minimums": partial(grouped_case, F32, 2, 320, 72, group=32, offsets="minimums"),
    "grouped, 8 bits": partial(grouped_case, F32, 2, 384, 96, bits=8, group=128, offsets="none"),
    "configurations": table_case,
}
if os.environ.get("TRITON_INTERPRET") != "1":
    BF16 = torch.bfloat16
    CASES |= {
        "product bf16": partial(product_case, BF16, 8, 4096, 6144, bias=True),
        "product of more rows bf16": partial(product_case, BF16, 50, 4096, 6144, bias=True),
        "normed bf16, gated": partial(normed_case, BF16, 8, 896, 2 * 4864, gated=True),
        "normed bf16, residual in fp32": partial(normed_case, BF16, 1, 4096, 6144, residual_dtype=F32),
        "grouped bf16, gated": partial(grouped_case, BF16, 8, 4096, 2 * 14336, gated=True),
        "grouped bf16": partial(grouped_case, BF16, 1, 896, 1152, group=32, offsets="minimums", bias=True),
    }


if __name__ == "__main__":
    sys.exit(run_cases(CASES))
