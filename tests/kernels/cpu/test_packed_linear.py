"""Dense bf16 weights packed for a CPU: the layout, products and rows, in C++ and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.cpu.elementwise import silu_and_mul
from pagewire.kernels.cpu.layouts import packed_layout
from pagewire.kernels.cpu.products import packed_linear
from tests.kernels.implementations import fallback, native
from tests.kernels.processor import batch_invariance, bf16_multiplied_as, norm_bounded_error
from tests.sweep import examples

pytestmark = pytest.mark.pairs

# Relative to the sum of |x * w|: rounding of sums in fp32, and of a result.
FP32_ROUNDING = 2e-6
RESULT_ROUNDING = 2**-8

FEW_TOKENS = 3  # up to here vectors multiply where there is a matrix unit, too


@pytest.fixture(params=[0, 2, 3], ids=["fastest", "floats", "fixed point"])
def is_fixed(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Packs weights in bf16, multiplied in each way, and in fixed point."""
    with bf16_multiplied_as(request.param):
        yield request.param == 3


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
        tolerance += norm_bounded_error(x.double(), weight.double())
    assert (error <= tolerance).all()


@pytest.mark.parametrize("num_threads", [1, 2, 16])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(64, 48), (576, 200), (40, 20), (33, 17), (1, 1), (2200, 70), (64, 1041)]
)
def test_product(is_fixed: bool, in_features: int, out_features: int, num_threads: int) -> None:
    """Every number of tokens that a kernel treats in its own way is multiplied. Among those that are computed in the
    same way it does not depend on the other tokens; in fixed point all are."""
    torch.set_num_threads(num_threads)
    weight, bias = random(out_features, in_features), random(out_features, seed=1)
    packed, x = packed_layout.pack(weight, fixed_point=is_fixed), random(257, in_features, seed=2)
    whole = native.packed_linear(x, packed, bias, out_features)
    assert_is_product(whole, x, weight, bias, fixed_point=is_fixed)
    assert_is_product(native.packed_linear(x, packed, None, out_features), x, weight, None, fixed_point=is_fixed)
    few = whole if is_fixed else native.packed_linear(x[:FEW_TOKENS], packed, bias, out_features)
    for num_tokens in (*range(26), 31, 32, 33, 47, 49, 64, 70):
        actual = native.packed_linear(x[:num_tokens], packed, bias, out_features)
        assert_is_product(actual, x[:num_tokens], weight, bias, fixed_point=is_fixed)
        assert torch.equal(actual, (few if num_tokens <= FEW_TOKENS else whole)[:num_tokens])


def test_a_result_larger_than_caches(is_fixed: bool) -> None:
    """Aligned rows of the result are written past the caches. So many tokens are also more than one part of
    the inputs."""
    for out_features in (3072, 3073):
        weight, bias, x = random(out_features, 40), random(out_features, seed=1), random(700, 40, seed=2)
        packed = packed_layout.pack(weight, fixed_point=is_fixed)
        assert_is_product(native.packed_linear(x, packed, bias, out_features), x, weight, bias, fixed_point=is_fixed)


@settings(max_examples=examples(60), deadline=None)
@given(
    num_tokens=st.integers(0, 70),
    in_features=st.integers(1, 150),
    out_features=st.integers(1, 150),
    with_bias=st.booleans(),
    strided=st.booleans(),
    fixed_point=st.booleans(),
)
def test_product_of_any_shape(
    num_tokens: int, in_features: int, out_features: int, with_bias: bool, strided: bool, fixed_point: bool
) -> None:
    x = random(num_tokens, 2 * in_features)[:, :in_features]
    x = x if strided else x.contiguous()
    weight, bias = random(out_features, in_features, seed=1), random(out_features, seed=2) if with_bias else None
    packed = packed_layout.pack(weight, fixed_point=fixed_point)
    for cpu in (native, fallback):
        actual = cpu.packed_linear(x, packed, bias, out_features)
        assert_is_product(actual, x, weight, bias, fixed_point=fixed_point)


def test_fixed_point_is_more_precise_than_bf16() -> None:
    """Rounding inputs and weights to fixed point moves sums by a fifth of what rounding inputs to bf16 does at most."""
    for in_features in (576, 1536, 4096):
        weight, x = random(100, in_features), torch.randn(40, in_features, generator=torch.Generator().manual_seed(1))
        exact = F.linear(x.double(), weight.double())
        packed = packed_layout.pack(weight, fixed_point=True)
        error = native.packed_linear(x, packed, None, 100).double() - exact
        rounded = F.linear(x.bfloat16().double(), weight.double()) - exact
        assert error.square().mean() < rounded.square().mean() / 25


@pytest.mark.parametrize("in_features", [32, 576, 1536])
@pytest.mark.parametrize("times", [30, 100, 300, 1000, 3000, 1e6])
def test_a_few_large_inputs_take_no_bits_from_the_others(in_features: int, times: float) -> None:
    """Models have inputs that are a thousand times the others. Here they meet weights of zero, so that errors of the
    others show."""
    generator = torch.Generator().manual_seed(3)
    weight, x = random(100, in_features), torch.randn(40, in_features, generator=generator)
    for token in range(len(x)):
        large = torch.randperm(in_features, generator=generator)[: 1 + token % 3]
        x[token, large] = times
    weight[:, (x == times).any(0)] = 0
    exact = F.linear(x.double(), weight.double())
    scale = exact.square().mean(1, keepdim=True).clamp(min=1e-3)
    packed = packed_layout.pack(weight, fixed_point=True)
    error = native.packed_linear(x, packed, None, 100).double() - exact
    rounded = F.linear(x.bfloat16().double(), weight.double()) - exact
    assert (error.square() / scale).mean() < (rounded.square() / scale).mean()


# Of inputs and weights; those from "tiny" on are beyond what squares hold
VECTORS: dict[str, Callable[[int], Tensor]] = {
    "equal": lambda n: torch.full((n,), 1.40625),
    "spike": lambda n: torch.cat([torch.full((1,), 1e4), torch.ones(n - 1)]),
    "falling": lambda n: 2.0 ** -torch.arange(n).clamp(max=60),
    "signs": lambda n: 1 - 2.0 * (torch.arange(n) % 2),
    "tiny": lambda n: torch.full((n,), 1e-25),
    "large": lambda n: torch.full((n,), 1e22),
    "largest": lambda n: torch.cat([torch.full((1,), 3e38), torch.zeros(n - 1)]),
}


@pytest.mark.parametrize("inputs", VECTORS)
@pytest.mark.parametrize("weights", ["equal", "spike", "falling", "signs"])
def test_no_sum_overflows(inputs: str, weights: str) -> None:
    for in_features in (32, 64, 96, 1024, 1056, 2200):
        x = VECTORS[inputs](in_features).repeat(40, 1)
        weight = VECTORS[weights](in_features).repeat(33, 1).bfloat16()
        weight *= 1e-5 if inputs == "largest" else 1  # so that sums are floats
        actual = native.packed_linear(x, packed_layout.pack(weight, fixed_point=True), None, 33)
        assert_is_product(actual, x, weight, None, fixed_point=True, dtype=torch.float32)


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 200), (33, 34), (64, 96)])
def test_sums_in_fp32(is_fixed: bool, in_features: int, out_features: int) -> None:
    """Compares sums with those that are rounded, and gated ones with the activation of both halves."""
    weight, bias = random(out_features, in_features), random(out_features, seed=1)
    packed, x = packed_layout.pack(weight, fixed_point=is_fixed), random(257, in_features, seed=2)
    for num_tokens in (0, 1, 4, 5, 16, 30, 257):
        sums = native.packed_linear(x[:num_tokens], packed, bias.float(), out_features, torch.float32)
        assert sums.dtype is torch.float32
        assert torch.equal(sums.bfloat16(), native.packed_linear(x[:num_tokens], packed, bias, out_features))
        gated = native.packed_gated_linear(x[:num_tokens], packed, bias.float(), out_features)
        torch.testing.assert_close(gated, silu_and_mul(sums, torch.bfloat16), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 200), (33, 34), (64, 96)])
def test_inputs_in_fp32(is_fixed: bool, in_features: int, out_features: int) -> None:
    """Inputs are not rounded, except where the processor multiplies bf16."""
    weight, bias = random(out_features, in_features), random(out_features, seed=1)
    x = torch.randn((257, in_features), generator=torch.Generator().manual_seed(2))
    packed = packed_layout.pack(weight, fixed_point=is_fixed)
    for num_tokens in (0, 1, 5, 30, 257):
        some = x[:num_tokens]
        sums = native.packed_linear(some, packed, bias.float(), out_features)
        rounded = native.packed_linear(some.bfloat16(), packed, bias.float(), out_features, torch.float32)
        if is_fixed or not torch.equal(sums, rounded):
            assert_is_product(sums, some, weight, bias, fixed_point=is_fixed, dtype=torch.float32)
        gated = native.packed_gated_linear(some, packed, bias.float(), out_features)
        torch.testing.assert_close(gated, silu_and_mul(sums), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 200), (33, 34)])
def test_batch_invariance(is_fixed: bool, in_features: int, out_features: int) -> None:
    """A token's sums are the same bit by bit whatever the others are; in fixed point they are anyway."""
    weight = random(out_features, in_features)
    packed = packed_layout.pack(weight, fixed_point=is_fixed)
    x = torch.randn((257, in_features), generator=torch.Generator().manual_seed(2))
    with nullcontext() if is_fixed else batch_invariance():
        for given in (x, x.bfloat16()):
            whole = native.packed_linear(given, packed, None, out_features, torch.float32)
            gated = native.packed_gated_linear(given, packed, None, out_features)
            for num_tokens in (1, 2, 3, 4, 5, 12, 24, 31, 100):
                some = given[-num_tokens:]
                actual = native.packed_linear(some, packed, None, out_features, torch.float32)
                assert torch.equal(actual, whole[-num_tokens:])
                assert torch.equal(native.packed_gated_linear(some, packed, None, out_features), gated[-num_tokens:])


def test_infinity_and_nan_stay_with_their_token_or_output(is_fixed: bool) -> None:
    for in_features in (64, 576):
        weight, x = random(100, in_features), random(40, in_features, seed=1)
        x[3, 5], x[17, 60] = float("inf"), float("nan")
        result = native.packed_linear(x, packed_layout.pack(weight, fixed_point=is_fixed), None, 100)
        assert (~result.isfinite()).any(dim=1).nonzero().flatten().tolist() == [3, 17]
        weight[7, 9], weight[99, 1] = float("inf"), float("nan")
        packed = packed_linear.pack(weight.clone(), fixed_point=is_fixed)
        result = native.packed_linear(random(40, in_features, seed=1), packed, None, 100)
        assert (~result.isfinite()).any(dim=0).nonzero().flatten().tolist() == [7, 99]


@given(num_rows=st.integers(1, 70), row_size=st.integers(1, 100), fixed_point=st.booleans(), spread=st.integers(0, 3))
@settings(max_examples=examples(60), deadline=None)
def test_rows_and_the_whole_come_back_as_they_were(
    num_rows: int, row_size: int, fixed_point: bool, spread: int
) -> None:
    """Fixed point loses nothing as long as magnitudes of a row differ by little."""
    generator = torch.Generator().manual_seed(num_rows)
    exponents = torch.randint(0, spread + 1, (num_rows, row_size), generator=generator)
    weight = ((1 + torch.rand(num_rows, row_size, generator=generator)) * 2.0**exponents).bfloat16()
    weight *= torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
    packed = packed_layout.pack(weight, fixed_point=fixed_point)
    assert torch.equal(packed_layout.unpack(packed, num_rows, row_size), weight)
    assert torch.equal(packed_linear.pack(weight.clone(), fixed_point=fixed_point), packed)
    token_ids = torch.randint(0, num_rows, (2, 5), generator=torch.Generator().manual_seed(0))
    for cpu in (native, fallback):
        assert torch.equal(cpu.packed_embedding(token_ids, packed, num_rows, row_size), weight[token_ids])


@pytest.mark.parametrize("in_features", [1, 40, 1024, 1056, 2200])
def test_both_implementations_round_to_the_same_integers(in_features: int) -> None:
    weight = random(37, in_features)
    weight[3] = 0
    weight[5] *= 1e-30
    weight[6, 0] = 1e9
    packed = packed_layout.pack(weight, fixed_point=True)
    assert torch.equal(packed_linear.pack(weight.clone(), fixed_point=True), packed)
    rows = packed_layout.unpack(packed, 37, in_features)
    assert torch.equal(native.packed_embedding(torch.arange(37), packed, 37, in_features), rows)


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
    for weight in (packed, packed_layout.pack(random(20, 40), fixed_point=True)):
        with pytest.raises(ValueError, match=r"not a packed weight \[40, 40\]"):
            native.packed_linear(x, weight, None, 40)
        with pytest.raises(ValueError, match=r"not a packed weight \[20, 70\]"):
            native.packed_linear(random(3, 70), weight, None, 20)
    with pytest.raises(TypeError, match=r"bfloat16 or float32, not torch\.float16"):
        native.packed_linear(x.half(), packed, None, 20)
    with pytest.raises(TypeError, match=r"torch\.bfloat16 as x, or torch\.float32, not torch\.float16"):
        native.packed_linear(x, packed, None, 20, torch.float16)
    for bias, dtype in ((torch.zeros(20), None), (torch.zeros(20).bfloat16(), torch.float32)):
        with pytest.raises(TypeError, match="bias must be"):
            native.packed_linear(x, packed, bias, 20, dtype)
    with pytest.raises(TypeError, match=r"not torch\.float16"):
        packed_linear.pack(random(20, 40).half(), fixed_point=False)
    with pytest.raises(TypeError, match="contiguous"):
        packed_linear.pack(random(20, 40)[:, :32], fixed_point=True)


def test_packing_takes_no_memory_where_nothing_is_padded() -> None:
    weight = random(48, 576)
    expected = packed_layout.pack(weight)
    packed = packed_linear.pack(weight, fixed_point=False)
    assert torch.equal(packed, expected) and packed.data_ptr() == weight.data_ptr()
