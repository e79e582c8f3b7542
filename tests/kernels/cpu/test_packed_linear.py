"""Dense bf16 weights packed for a CPU: the layout, products and rows, in C++ and in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.cpu.elementwise import silu_and_mul
from pagewire.kernels.cpu.layouts import packed_layout
from pagewire.kernels.cpu.products import packed_linear
from pagewire.kernels.cpu.products.packed_linear import in_fixed_point
from tests.kernels.implementations import fallback, native
from tests.kernels.processor import CPU, batch_invariance, bf16_multiplied_as, fixed_point_error
from tests.sweep import examples

pytestmark = pytest.mark.pairs

# Relative to the sum of |x * w|: rounding of sums in fp32, and of a result.
FP32_ROUNDING = 2e-6
RESULT_ROUNDING = 2**-8

FEW_TOKENS = 3  # up to here vectors multiply where there is a matrix unit, too
FIXED_POINT_TOKENS = 24 if "avx512f" in CPU else 12  # from here on in fixed point, where that is the fastest


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_is_product(
    actual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    fixed_point: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    wide_bias = None if bias is None else bias.double()
    expected = F.linear(x.double(), weight.double(), wide_bias)
    magnitude = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    assert actual.dtype is dtype and actual.shape == expected.shape
    error = (actual.double() - expected).abs()
    tolerance = FP32_ROUNDING * magnitude + (RESULT_ROUNDING * expected.abs() if dtype is torch.bfloat16 else 0)
    if fixed_point:
        tolerance += fixed_point_error(x.double(), weight.double(), weight.double())
    assert (error <= tolerance).all()


@pytest.mark.parametrize("num_threads", [1, 2, 16])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(64, 48), (576, 200), (40, 20), (33, 17), (1, 1), (2200, 70), (64, 1041)]
)
def test_product(bf16_form: int, in_features: int, out_features: int, num_threads: int) -> None:
    """Every number of tokens that a kernel treats in its own way is multiplied. Among those that are computed in the
    same way it does not depend on the other tokens."""
    torch.set_num_threads(num_threads)
    weight, bias = random(out_features, in_features), random(out_features, seed=1)
    packed, x = packed_layout.pack(weight), random(257, in_features, seed=2)
    whole = native.packed_linear(x, packed, bias, out_features)
    is_fixed = in_fixed_point(len(x), FIXED_POINT_TOKENS)
    assert_is_product(whole, x, weight, bias, fixed_point=is_fixed)
    assert_is_product(native.packed_linear(x, packed, None, out_features), x, weight, None, fixed_point=is_fixed)
    limits = [FEW_TOKENS, len(x)]  # up to which products are computed in the same way
    if is_fixed and not in_fixed_point(FIXED_POINT_TOKENS - 1, FIXED_POINT_TOKENS):
        limits.insert(1, FIXED_POINT_TOKENS - 1)
    wholes = {limit: native.packed_linear(x[:limit], packed, bias, out_features) for limit in limits}
    for num_tokens in (*range(26), 31, 32, 33, 47, 49, 64, 70):
        actual = native.packed_linear(x[:num_tokens], packed, bias, out_features)
        is_fixed = in_fixed_point(num_tokens, FIXED_POINT_TOKENS)
        assert_is_product(actual, x[:num_tokens], weight, bias, fixed_point=is_fixed)
        same_way = wholes[next(limit for limit in limits if num_tokens <= limit)]
        assert torch.equal(actual, same_way[:num_tokens])


@pytest.mark.usefixtures("bf16_form")
def test_a_result_larger_than_caches() -> None:
    """Aligned rows of the result are written past the caches. So many tokens are also more than one part of
    the inputs."""
    for out_features in (3072, 3073):
        weight, bias, x = random(out_features, 40), random(out_features, seed=1), random(700, 40, seed=2)
        actual = native.packed_linear(x, packed_layout.pack(weight), bias, out_features)
        assert_is_product(actual, x, weight, bias, fixed_point=in_fixed_point(len(x), FIXED_POINT_TOKENS))


@settings(max_examples=examples(60), deadline=None)
@given(
    num_tokens=st.integers(0, 70),
    in_features=st.integers(1, 150),
    out_features=st.integers(1, 150),
    with_bias=st.booleans(),
    strided=st.booleans(),
)
def test_product_of_any_shape(
    num_tokens: int, in_features: int, out_features: int, with_bias: bool, strided: bool
) -> None:
    x = random(num_tokens, 2 * in_features)[:, :in_features]
    x = x if strided else x.contiguous()
    weight, bias = random(out_features, in_features, seed=1), random(out_features, seed=2) if with_bias else None
    packed = packed_layout.pack(weight)
    actual = native.packed_linear(x, packed, bias, out_features)
    assert_is_product(actual, x, weight, bias, fixed_point=in_fixed_point(num_tokens, FIXED_POINT_TOKENS))
    assert_is_product(fallback.packed_linear(x, packed, bias, out_features), x, weight, bias)


def test_fixed_point_is_as_precise_as_bf16() -> None:
    """Fixed point is used, and changes results by far less than their rounding does."""
    weight, x = random(100, 576), random(40, 576, seed=1)
    packed, exact = packed_layout.pack(weight), F.linear(x.double(), weight.double())
    errors = {}
    for form in (2, 3):
        with bf16_multiplied_as(form):
            is_fixed = in_fixed_point(len(x), FIXED_POINT_TOKENS)
            errors[form] = (native.packed_linear(x, packed, None, 100).double() - exact).square().mean().sqrt()
    assert (errors[2] != errors[3]) == is_fixed
    assert errors[3] < 1.05 * errors[2]


def test_sums_of_the_largest_integers_fit() -> None:
    """All inputs and weights are the largest of their block."""
    for sign in (1, -1):
        x, weight = torch.ones(40, 2200).bfloat16(), torch.full((33, 2200), sign).bfloat16()
        packed = packed_layout.pack(weight)
        with bf16_multiplied_as(3):
            actual = native.packed_linear(x, packed, None, 33)
        assert torch.equal(actual, F.linear(x.double(), weight.double()).bfloat16())


@pytest.mark.usefixtures("bf16_form")
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 200), (33, 34), (64, 96)])
def test_sums_in_fp32(in_features: int, out_features: int) -> None:
    """Compares sums with those that are rounded, and gated ones with the activation of both halves."""
    weight, bias = random(out_features, in_features), random(out_features, seed=1)
    packed, x = packed_layout.pack(weight), random(257, in_features, seed=2)
    for num_tokens in (0, 1, 4, 5, 16, 30, 257):
        sums = native.packed_linear(x[:num_tokens], packed, bias.float(), out_features, torch.float32)
        assert sums.dtype is torch.float32
        assert torch.equal(sums.bfloat16(), native.packed_linear(x[:num_tokens], packed, bias, out_features))
        gated = native.packed_gated_linear(x[:num_tokens], packed, bias.float(), out_features)
        torch.testing.assert_close(gated, silu_and_mul(sums, torch.bfloat16), rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("bf16_form")
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 200), (33, 34), (64, 96)])
def test_inputs_in_fp32(in_features: int, out_features: int) -> None:
    """Inputs are not rounded, except where the processor multiplies bf16."""
    weight, bias = random(out_features, in_features), random(out_features, seed=1)
    x = torch.randn((257, in_features), generator=torch.Generator().manual_seed(2))
    packed, rounds = packed_layout.pack(weight), packed_linear.rounds_inputs.__wrapped__(quantized=False)
    for num_tokens in (0, 1, 5, 30, 257):
        some = x[:num_tokens]
        sums = native.packed_linear(some, packed, bias.float(), out_features)
        if rounds:
            rounded = native.packed_linear(some.bfloat16(), packed, bias.float(), out_features, torch.float32)
            assert torch.equal(sums, rounded)
        else:
            is_fixed = in_fixed_point(num_tokens, FIXED_POINT_TOKENS)
            assert_is_product(sums, some, weight, bias, fixed_point=is_fixed, dtype=torch.float32)
        gated = native.packed_gated_linear(some, packed, bias.float(), out_features)
        torch.testing.assert_close(gated, silu_and_mul(sums), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("bf16_form")
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 200), (33, 34)])
def test_batch_invariance(in_features: int, out_features: int) -> None:
    """A token's sums are the same bit by bit whatever the others are."""
    weight = random(out_features, in_features)
    packed, x = packed_layout.pack(weight), torch.randn((257, in_features), generator=torch.Generator().manual_seed(2))
    with batch_invariance():
        for given in (x, x.bfloat16()):
            whole = native.packed_linear(given, packed, None, out_features, torch.float32)
            gated = native.packed_gated_linear(given, packed, None, out_features)
            for num_tokens in (1, 2, 3, 4, 5, 12, 24, 31, 100):
                some = given[-num_tokens:]
                actual = native.packed_linear(some, packed, None, out_features, torch.float32)
                assert torch.equal(actual, whole[-num_tokens:])
                assert torch.equal(native.packed_gated_linear(some, packed, None, out_features), gated[-num_tokens:])


@pytest.mark.usefixtures("bf16_form")
def test_infinity_and_nan_stay_with_their_token() -> None:
    weight, x = random(100, 64), random(40, 64, seed=1)
    x[3, 5], x[17, 60] = float("inf"), float("nan")
    result = native.packed_linear(x, packed_layout.pack(weight), None, 100)
    spoiled = (~result.isfinite()).any(dim=1).nonzero().flatten().tolist()
    assert spoiled == [3, 17]


@given(num_rows=st.integers(1, 70), row_size=st.integers(1, 100))
@settings(max_examples=examples(40), deadline=None)
def test_rows_and_the_whole_come_back_as_they_were(num_rows: int, row_size: int) -> None:
    weight = random(num_rows, row_size)
    packed = packed_layout.pack(weight)
    assert torch.equal(packed_layout.unpack(packed, num_rows, row_size), weight)
    assert torch.equal(packed_linear.pack(weight.clone()), packed)
    token_ids = torch.randint(0, num_rows, (2, 5), generator=torch.Generator().manual_seed(0))
    for cpu in (native, fallback):
        assert torch.equal(cpu.packed_embedding(token_ids, packed, num_rows, row_size), weight[token_ids])


def test_layout() -> None:
    """The layout is that of the instructions: pairs of inputs by outputs; zeros where there are no inputs or
    outputs."""
    weight = (torch.arange(17)[:, None] + torch.arange(34) / 64).bfloat16()
    packed = packed_layout.pack(weight)
    assert packed.shape == (2, 2, 16, 32)
    unit = packed[0, 0].view(16, 16, 2)
    for row, output in ((0, 0), (3, 5), (15, 15)):
        assert torch.equal(unit[row, output], weight[output, 2 * row : 2 * row + 2])
    assert torch.equal(packed[0, 1, 0].view(16, 2), weight[:16, 32:])
    assert packed[0, 1, 1:].count_nonzero() == 0 and packed[1, :, :, 2:].count_nonzero() == 0


def test_ids_out_of_the_table_are_refused() -> None:
    packed = packed_layout.pack(random(20, 40))
    for token_id in (-1, 20):
        with pytest.raises(IndexError, match="not rows of a table of 20"):
            native.packed_embedding(torch.tensor([0, token_id]), packed, 20, 40)
    assert native.packed_embedding(torch.tensor([], dtype=torch.int64), packed, 20, 40).shape == (0, 40)


def test_wrong_operands_are_refused() -> None:
    packed, x = packed_layout.pack(random(20, 40)), random(3, 40)
    with pytest.raises(ValueError, match=r"not a packed weight \[40, 40\]"):
        native.packed_linear(x, packed, None, 40)
    with pytest.raises(ValueError, match=r"not a packed weight \[20, 70\]"):
        native.packed_linear(random(3, 70), packed, None, 20)
    with pytest.raises(TypeError, match=r"bfloat16 or float32, not torch\.float16"):
        native.packed_linear(x.half(), packed, None, 20)
    with pytest.raises(TypeError, match=r"torch\.bfloat16 as x, or torch\.float32, not torch\.float16"):
        native.packed_linear(x, packed, None, 20, torch.float16)
    for bias, dtype in ((torch.zeros(20), None), (torch.zeros(20).bfloat16(), torch.float32)):
        with pytest.raises(TypeError, match="bias must be"):
            native.packed_linear(x, packed, bias, 20, dtype)
    with pytest.raises(TypeError, match=r"not torch\.float16"):
        packed_linear.pack(random(20, 40).half())
    with pytest.raises(TypeError, match="contiguous"):
        packed_linear.pack(random(20, 40)[:, :32])


def test_packing_takes_no_memory_where_nothing_is_padded() -> None:
    weight = random(48, 576)
    expected = packed_layout.pack(weight)
    packed = packed_linear.pack(weight)
    assert torch.equal(packed, expected) and packed.data_ptr() == weight.data_ptr()
