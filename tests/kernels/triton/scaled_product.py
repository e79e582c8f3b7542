"""The ops int8_linear and fp8_linear against the references, in Triton's interpreter on the CPU. Run by
test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.scaled_product [--sweep]

in a process of its own, because Triton reads the variable when a kernel is defined; with --sweep, random combinations
instead (minutes). fp32 and fp16 only, bf16 is in `bf16.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pagewire.kernels import reference, tuning
from pagewire.kernels.triton.common.arrivals import arrival_counters
from pagewire.kernels.triton.products import fp8_linear, int8_linear, scaled_product
from tests.kernels.triton.interpreted import run_cases, some_of
from tests.kernels.triton.quantize_input import F16, F32, FP8, INT8, NAN, fp8_weight, tokens_of

# Of the largest number of a result: a sum's rounding in fp32, and then the result's.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Tensor cores add products of e4m3 with 13 bits behind the first, and truncate; 1,300 inputs as here come to 0.0014.
TENSOR_CORE_TOLERANCE = 4e-3
INFINITY = float("inf")


def assert_close(actual: Tensor, expected: Tensor, *, by_fp8: bool = False) -> None:
    """Returns the tolerance of a product. by_fp8: of e4m3 with e4m3."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
    tolerance = TOLERANCES[expected.dtype]
    if by_fp8 and actual.is_cuda:
        tolerance = max(tolerance, TENSOR_CORE_TOLERANCE)
    torch.testing.assert_close(actual, expected, atol=tolerance * largest, rtol=tolerance, equal_nan=True)


@contextmanager
def configured(**values: int) -> Iterator[None]:
    """Within the block the tables' configurations with these values in place of theirs."""
    look_up = tuning.lookup
    with mock.patch.object(tuning, "lookup", lambda kernel, *a, **k: dict(look_up(kernel, *a, **k)) | values):
        yield


@contextmanager
def count_splits(expected: bool) -> Iterator[None]:
    """Fails unless products within the block are split as expected, and leave their counters as they found them."""
    found: list[bool] = []
    splits = scaled_product._splits

    def recorded(*args: int) -> tuple[int, int]:
        result = splits(*args)
        found.append(result[0] > 1)
        return result

    with mock.patch.object(scaled_product, "_splits", recorded):
        yield
    assert found == [expected] * len(found) and found, "splits are not as this case expects"
    assert not arrival_counters(torch.empty(0).device, 1).any(), "the next launch would count from here"


def int8_weight(num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-128, 128, (num_outputs, num_inputs), dtype=INT8), torch.rand(num_outputs) * 0.01


def not_finite_case() -> None:
    """A NaN or, where the scale comes from the numbers, an infinity is not lost, and harms no other token."""
    x = tokens_of(20, 300)
    x[3, 299], x[5, 0], x[7, 150] = NAN, INFINITY, -INFINITY
    ok = torch.ones(20, dtype=torch.bool)
    ok[[3, 5, 7]] = False
    weight8, scales8 = int8_weight(40, 300)
    for input_scale in (None, torch.tensor([0.05])):
        actual = int8_linear.int8_linear(x, weight8, scales8, input_scale, None, False)
        assert_close(actual, reference.int8_linear(x, weight8, scales8, input_scale, None, False))
        assert actual[3].isnan().all()
    for blocks in (False, True):
        weight, scales = fp8_weight(40, 300, blocks)
        for input_scale in (None, torch.tensor([0.05])):
            actual = fp8_linear.quantized_linear(x, weight, scales, input_scale, None)
            expected = reference.fp8_linear(x, weight, scales, input_scale, None, False, quantize_input=True)
            assert_close(actual, expected, by_fp8=True)
        actual = fp8_linear.weight_only_linear(x, weight, scales, None)
        assert_close(actual[ok], reference.fp8_linear(x, weight, scales, None, None, False)[ok])
        assert not actual[~ok].isfinite().any()


Shape = tuple[int, int, int]  # tokens, outputs, inputs


def int8_case(
    shape: Shape,
    dtype: torch.dtype = F32,
    fixed: bool = False,
    bias: bool = False,
    split: bool = False,
    gated: bool = False,
) -> None:
    num_tokens, num_outputs, num_inputs = shape
    x = tokens_of(num_tokens, num_inputs, dtype)
    weight, scales = int8_weight(num_outputs, num_inputs)
    input_scale = torch.tensor([0.02]) if fixed else None
    added = torch.randn(num_outputs).to(dtype) if bias else None
    with count_splits(split):
        product = partial(int8_linear.int8_linear, x, weight, scales, input_scale, added, gated)
        results = [product() for _ in range(2 if split else 1)]
    assert torch.equal(results[0], results[-1]), "splits are added up in another order, or were not all done"
    assert_close(results[0], reference.int8_linear(x, weight, scales, input_scale, added, gated))


def int8_exact_case() -> None:
    """Integers, which are exact in the reference too."""
    x = torch.randint(-140, 140, (19, 1100)).float()
    weight = torch.randint(-128, 128, (45, 1100), dtype=INT8)
    one = torch.ones(1)
    actual = int8_linear.int8_linear(x, weight, torch.ones(45), one, None, False)
    expected = x.clamp(-128, 127).double() @ weight.double().T
    assert torch.equal(actual.double(), expected)


def fp8_case(
    shape: Shape,
    dtype: torch.dtype = F32,
    blocks: bool = False,
    fixed: bool = False,
    bias: bool = False,
    split: bool = False,
    quantized: bool = True,
    gated: bool = False,
) -> None:
    num_tokens, num_outputs, num_inputs = shape
    x = tokens_of(num_tokens, num_inputs, dtype)
    weight, scales = fp8_weight(num_outputs, num_inputs, blocks)
    input_scale = torch.tensor([0.004]) if fixed else None
    added = torch.randn(num_outputs).to(dtype) if bias else None
    if quantized:
        product = partial(fp8_linear.quantized_linear, x, weight, scales, input_scale, added, gated)
    else:
        product = partial(fp8_linear.weight_only_linear, x, weight, scales, added, gated)
    with count_splits(split):
        actual = product()
    expected = reference.fp8_linear(x, weight, scales, input_scale, added, gated, quantize_input=quantized)
    assert_close(actual, expected, by_fp8=quantized)


weight_only = partial(fp8_case, quantized=False)


def library_case(blocks: bool, gated: bool = False) -> None:
    """The weight is converted as a whole from library_rows on."""
    x = tokens_of(5, 200, F16)
    weight, scales = fp8_weight(30, 200, blocks)
    bias = torch.randn(30).half()
    with configured(library_rows=5), mock.patch.object(fp8_linear, "scaled_product", None):
        actual = fp8_linear.weight_only_linear(x, weight, scales, bias, gated)
    assert_close(actual, reference.fp8_linear(x, weight, scales, None, bias, gated))


def library_product_case(blocks: bool) -> None:
    """Torch's product adds as the tensor cores do, but with scales per block, and then takes quadruples of tokens."""
    x = tokens_of(6, 512)
    weight, scales = fp8_weight(128, 512, blocks)
    asked: list[tuple[int, bool]] = []

    def product(
        codes: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, bias: None, *, out_dtype: torch.dtype,
        use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        asked.append((len(codes), use_fast_accum))
        if blocks:
            assert x_scales.shape == (8, 4) and x_scales.stride() == (1, 8) and scales.shape == (4, 1)
            x_scales, scales = x_scales.repeat_interleave(128, 1), scales.repeat_interleave(128, 0)
            return ((codes.float() * x_scales) @ (weight.float() * scales)).to(out_dtype)
        return (codes.float() @ weight.float() * x_scales * scales).to(out_dtype)

    with (
        configured(library_rows=1, block_library_rows=1),
        mock.patch.object(fp8_linear, "_refusal", lambda *_: None),
        mock.patch.object(torch, "_scaled_mm", product),
    ):
        actual = fp8_linear.quantized_linear(x, weight, scales, None, None)
        assert asked == [(8 if blocks else 6, not blocks)]
        # It has no blocks with a scale for all of the input.
        fixed = fp8_linear.quantized_linear(x, weight, scales, torch.tensor([0.01]), None)
    assert len(asked) == (1 if blocks else 2)
    assert_close(actual, reference.fp8_linear(x, weight, scales, None, None, False, quantize_input=True), by_fp8=True)
    expected = reference.fp8_linear(x, weight, scales, torch.tensor([0.01]), None, False, quantize_input=True)
    assert_close(fixed, expected, by_fp8=True)


def choice_case() -> None:
    """A number of tokens and a GPU decide which product is used."""
    x = tokens_of(fp8_linear.WEIGHT_ONLY_ROWS + 1, 64)
    weight, scales = fp8_weight(20, 64, blocks=False)
    full, quantized = (
        reference.fp8_linear(x, weight, scales, None, None, False, quantize_input=quantize)
        for quantize in (False, True)
    )
    assert not torch.allclose(full, quantized, rtol=1e-3)
    assert_close(fp8_linear.fp8_linear(x, weight, scales, None, None, False), quantized, by_fp8=True)
    few = slice(1, None)
    assert_close(fp8_linear.fp8_linear(x[few], weight, scales, None, None, False), full[few])
    with mock.patch.object(fp8_linear, "WEIGHT_ONLY_BYTES", 20 * 64 - 1):
        assert_close(fp8_linear.fp8_linear(x[few], weight, scales, None, None, False), quantized[few], by_fp8=True)
    with mock.patch.object(fp8_linear, "multiplies_fp8", lambda device: False):
        assert_close(fp8_linear.fp8_linear(x, weight, scales, None, None, False), full)


def refusals_case() -> None:
    """The log says once what torch._scaled_mm does not take."""
    gpu, bf16 = torch.device("cuda"), torch.bfloat16

    def refusal(*weight: Any) -> str:
        return fp8_linear._refusal.__wrapped__(gpu, *weight) or "none"

    with (
        mock.patch.object(tuning, "capability_of", lambda device: 90),
        mock.patch.object(torch.version, "cuda", "12.9"),
    ):
        assert refusal(bf16, 48, 32) == "none"
        assert "multiples of 16, not a weight of 40 x 32" in refusal(bf16, 40, 32)
        assert "multiples of 16" in refusal(bf16, 32, 40)
        assert "gives bfloat16, not torch.float16" in refusal(F16, 48, 32)
        assert refusal(bf16, 128, 512, True) == "none"
        assert "whole blocks" in refusal(bf16, 128, 384, True)
        with mock.patch.object(torch.version, "cuda", "12.8"):
            assert "no blocks with CUDA 12.8, but from 12.9 on" in refusal(bf16, 128, 512, True)
            assert refusal(bf16, 48, 32) == "none"
    with mock.patch.object(tuning, "capability_of", lambda device: 89):
        assert "no blocks on compute capability 8.9" in refusal(bf16, 128, 512, True)
    with mock.patch.object(tuning, "capability_of", lambda device: 120):
        assert "compute capability 12.0" in refusal(bf16, 48, 32)
    with mock.patch.object(fp8_linear.logger, "warning") as warning, configured(library_rows=1):
        fp8_linear._log_refusal.cache_clear()
        x, (weight, scales) = tokens_of(1, 32), fp8_weight(16, 32, blocks=False)
        for _ in range(2):
            fp8_linear.quantized_linear(x, weight, scales, None, None)
    assert warning.call_count == 1


def huge_strides_case() -> None:
    """The last token lies more than 2^31 elements behind the first. The memory between them is never touched."""
    storage = torch.empty(2**31 + 2**20, dtype=F16)
    x = storage.as_strided((2, 96), (2**31 + 64, 1))
    x.copy_(torch.randn(2, 96))
    weight, scales = fp8_weight(20, 96, blocks=False)
    expected = reference.fp8_linear(x, weight, scales, None, None, False)
    assert_close(fp8_linear.weight_only_linear(x, weight, scales, None), expected)
    expected = reference.fp8_linear(x, weight, scales, None, None, False, quantize_input=True)
    assert_close(fp8_linear.quantized_linear(x, weight, scales, None, None), expected, by_fp8=True)


def no_tokens_case() -> None:
    x = torch.empty(0, 64, dtype=F16)
    weight, scales = fp8_weight(20, 64, blocks=False)
    assert fp8_linear.fp8_linear(x, weight, scales, None, None, False).shape == (0, 20)
    assert int8_linear.int8_linear(x, weight.view(INT8), scales, None, None, False).shape == (0, 20)


def wrong_operands_case() -> None:
    x = torch.randn(2, 64)
    weight, scales = fp8_weight(20, 64, blocks=False)
    wrong: dict[str, tuple[Tensor, Tensor, Tensor, Tensor | None]] = {
        "weight must be torch.float8_e4m3fn": (x, weight.view(INT8), scales, None),
        "as many inputs": (x[:, :60], weight, scales, None),
        "x must be float32": (x.double(), weight, scales, None),
        "scales must be float32": (x, weight, scales.half(), None),
        "ceil(N / 128)": (x, weight, scales[:7], None),
        "bias must be [N]": (x, weight, scales, torch.zeros(7)),
        "bias must have x's dtype": (x, weight, scales, torch.zeros(20).half()),
        "must be contiguous": (x, weight.view(INT8)[:, ::2].view(FP8), scales, None),
    }
    for message, (tokens, codes, factors, bias) in wrong.items():
        tokens = tokens[:, ::2] if message == "must be contiguous" else tokens
        try:
            fp8_linear.fp8_linear(tokens, codes, factors, None, bias, False)
        except AssertionError as error:
            assert message in str(error), f"{error} should say {message}"
        else:
            raise AssertionError(f"accepted: {message}")


CASES: dict[str, Callable[[], None]] = {
    "NaN and infinities": not_finite_case,
    "int8": partial(int8_case, (3, 70, 200), bias=True),
    "int8, one token, fixed scale": partial(int8_case, (1, 65, 33), fixed=True),
    "int8 fp16, several tiles": partial(int8_case, (37, 130, 128), F16),
    "int8, splits": partial(int8_case, (2, 9, 1300), bias=True, split=True),
    "int8, exact": int8_exact_case,
    "int8, gated": partial(int8_case, (3, 2 * 70, 200), bias=True, gated=True),
    "int8, gated, splits": partial(int8_case, (2, 2 * 9, 1300), bias=True, split=True, gated=True),
    "fp8, gated": partial(fp8_case, (37, 2 * 70, 200), F16, bias=True, gated=True),
    **some_of(
        {
            f"fp8 blocks, gated, {tokens} tokens{', splits' * split}": partial(
                fp8_case, (tokens, 2 * 128, inputs), blocks=True, bias=True, split=split, gated=True
            )
            for tokens, inputs, split in ((21, 300, False), (70, 300, False), (3, 2600, True))
        }
    ),
    "fp8 blocks of gates and ups": partial(fp8_case, (5, 2 * 64, 300), blocks=True, gated=True),
    "weight-only, gated": partial(weight_only, (3, 2 * 70, 200), bias=True, gated=True),
    "weight-only blocks, gated": partial(weight_only, (20, 2 * 256, 130), F16, blocks=True, gated=True),
    "weight-only by the library, gated": partial(library_case, False, gated=True),
    "fp8": partial(fp8_case, (3, 70, 200), bias=True),
    "fp8 fp16, fixed scale": partial(fp8_case, (19, 65, 33), F16, fixed=True),
    "fp8 blocks, ragged": partial(fp8_case, (21, 131, 300), blocks=True, bias=True),
    "fp8 blocks, many tokens": partial(fp8_case, (70, 150, 300), blocks=True, bias=True),
    "fp8 blocks, many tokens, splits": partial(fp8_case, (65, 9, 1300), blocks=True, split=True),
    "fp8 blocks, fixed scale": partial(fp8_case, (2, 40, 257), blocks=True, fixed=True),
    "fp8 blocks, splits": partial(fp8_case, (3, 9, 1300), blocks=True, split=True),
    "fp8, splits": partial(fp8_case, (3, 9, 1300), F16, bias=True, split=True),
    "weight-only": partial(weight_only, (3, 70, 200), bias=True),
    "weight-only fp16": partial(weight_only, (20, 65, 130), F16, bias=True),
    "weight-only fp16 blocks, splits": partial(weight_only, (1, 131, 1300), F16, blocks=True, split=True),
    "weight-only by the library": partial(library_case, False),
    "weight-only by the library, blocks": partial(library_case, True),
    "torch's product": partial(library_product_case, False),
    "torch's product of blocks": partial(library_product_case, True),
    "choice of a product": choice_case,
    "refusals of the library": refusals_case,
    "huge strides": huge_strides_case,
    "no tokens": no_tokens_case,
    "wrong operands": wrong_operands_case,
}


def random_case(seed: int) -> None:
    random = Random(seed)
    shape = (random.choice([1, 2, 5, 16, 17, 40, 70]), random.randint(1, 200), random.randint(1, 700))
    dtype, bias, fixed = random.choice([F32, F16]), random.random() < 0.5, random.random() < 0.3
    # Whether the inputs are split follows from the sizes; here it does not matter.
    with mock.patch(f"{__name__}.count_splits", lambda _: configured()):
        if random.random() < 0.4:
            int8_case(shape, dtype, fixed, bias)
        else:
            fp8_case(shape, dtype, random.random() < 0.5, fixed, bias, quantized=random.random() < 0.5)


SWEEP: dict[str, Callable[[], None]] = {f"product, seed {seed}": partial(random_case, seed) for seed in range(60)}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, SWEEP))
