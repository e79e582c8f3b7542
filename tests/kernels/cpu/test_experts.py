"""A mixture of experts on the CPU, C++ and plain torch, against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.cpu.layouts import packed_layout
from pagewire.kernels.quantized import GroupedWeight
from pagewire.kernels.quantized.packed import pack_grouped
from tests.kernels.implementations import fallback, native
from tests.sweep import examples

pytestmark = pytest.mark.pairs

cpu = pytest.mark.parametrize("cpu", [native, fallback], ids=["cpp", "torch"])
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@settings(max_examples=examples(60), deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    groups=st.sampled_from([(1, 1, 1), (4, 2, 1), (4, 1, 2), (8, 3, 2)]),
    group_size=st.integers(3, 9),
    top_k=st.integers(1, 3),
    scoring=st.sampled_from(["softmax", "sigmoid", "softmax_of_chosen"]),
    dtype=st.sampled_from(list(TOLERANCES)),
    has_bias=st.booleans(),
    normalize=st.booleans(),
    seed=st.integers(0, 999),
)
def test_route_experts(
    num_tokens: int,
    groups: tuple[int, int, int],
    group_size: int,
    top_k: int,
    scoring: str,
    dtype: torch.dtype,
    has_bias: bool,
    normalize: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_experts = groups[0] * group_size
    logits = torch.randn(num_tokens, num_experts, generator=generator).to(dtype)
    if num_tokens:
        logits[0] = logits[0, 0]  # all equal: the first are taken
    bias = torch.randn(num_experts, generator=generator) if has_bias else None
    arguments = (logits, bias, top_k, scoring, normalize, 2.5, *groups)
    ids, weights = native.route_experts(*arguments)
    expected_ids, expected_weights = reference.route_experts(*arguments)
    # Scores that differ by less than exponentials do may change places.
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)
    assert (ids == expected_ids).float().mean() > 0.99 if num_tokens else ids.shape == (0, top_k)


def test_logits_that_are_not_numbers_still_name_distinct_experts() -> None:
    """Tokens that are never read, such as padding, may have NaN."""
    logits = torch.full((3, 20), float("nan"))
    logits[1, ::2] = 1.0
    logits[2] = float("inf")
    for groups in ((1, 1, 1), (4, 2, 2)):
        ids, _ = native.route_experts(logits, None, 6, "softmax", True, 1.0, *groups)
        assert all(len(set(row)) == 6 and min(row) >= 0 and max(row) < 20 for row in ids.tolist())


def chosen(num_tokens: int, top_k: int, num_experts: int, seed: int) -> Tensor:
    """Draws ids int32 [T, k]; some experts have no token, the first has most."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores[:, 0] += 0.5
    scores[:, num_experts // 2 :: 3] = -1
    return scores.argsort(dim=1, descending=True)[:, :top_k].int()


@given(st.integers(0, 70), st.integers(1, 4), st.integers(8, 20), st.integers(0, 999))
@settings(max_examples=examples(30), deadline=None)
def test_sort_by_expert(num_tokens: int, top_k: int, num_experts: int, seed: int) -> None:
    ids = chosen(num_tokens, top_k, num_experts, seed)
    order, starts = native.sort_by_expert(ids, num_experts)
    expected_order, expected_starts = reference.sort_by_expert(ids, num_experts)
    assert torch.equal(order, expected_order) and torch.equal(starts, expected_starts)
    for expert in range(num_experts):
        pairs = order[starts[expert] : starts[expert + 1]].long()
        assert torch.equal(pairs, (ids.flatten() == expert).nonzero().flatten())


@cpu
@pytest.mark.parametrize("num_tokens", [1, 9, 60])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("per_pair", [False, True], ids=["a row per token", "a row per pair"])
@pytest.mark.parametrize("gated", [False, True], ids=["as they are", "gated"])
def test_dense_products(cpu: ModuleType, num_tokens: int, dtype: torch.dtype, per_pair: bool, gated: bool) -> None:
    num_experts, outputs, inputs = 12, 48, 70
    order, starts = reference.sort_by_expert(chosen(num_tokens, 3, num_experts, num_tokens), num_experts)
    x = torch.randn(num_tokens * (3 if per_pair else 1), inputs).to(dtype)
    weight = (torch.randn(num_experts * outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(num_experts * outputs).to(dtype)
    expected = reference.experts_linear(x, weight, bias, order, starts, gated)
    tolerance = TOLERANCES[dtype]
    actual = cpu.experts_linear(x, weight, bias, order, starts, gated)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    for fixed_point in (False, True) if dtype is torch.bfloat16 else ():
        packed = packed_layout.pack(weight, fixed_point=fixed_point)
        actual = cpu.packed_experts_linear(x, packed, bias, order, starts, num_experts * outputs, gated)
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@cpu
@pytest.mark.parametrize("num_tokens", [2, 40])
@pytest.mark.parametrize("form", ["symmetric", "zeros", "minimums", "two levels"])
@pytest.mark.parametrize("gated", [False, True], ids=["as they are", "gated"])
def test_grouped_products(cpu: ModuleType, num_tokens: int, form: str, gated: bool) -> None:
    num_experts, outputs, inputs, group = 8, 32, 256, 32
    order, starts = reference.sort_by_expert(chosen(num_tokens, 2, num_experts, 1), num_experts)
    size, groups = num_experts * outputs, inputs // group
    codes = torch.randint(0, 16, (size, inputs), dtype=torch.uint8)
    scales, offsets = torch.rand(size, groups) * 0.01, torch.randint(0, 16, (size, groups), dtype=torch.uint8)
    supers = torch.rand(size, 1).half() * 0.01
    weight = {
        "symmetric": GroupedWeight(codes, 4, group, scales, zero_point=8),
        "zeros": GroupedWeight(codes, 4, group, scales, offsets=offsets),
        "minimums": GroupedWeight(codes, 4, group, scales, offsets=-8 * scales),
        "two levels": GroupedWeight(codes, 4, group, offsets.view(torch.int8), supers, offsets, -8 * supers),
    }[form]
    packed = pack_grouped(weight, "cpu")
    bias = torch.randn(size)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(num_tokens, inputs).to(dtype)
        expected = reference.grouped_experts_linear(x, weight, bias.to(dtype), order, starts, gated)
        actual = cpu.grouped_experts_linear(
            x,
            packed.codes,
            packed.scales,
            packed.offsets,
            packed.codebook,
            bias.to(dtype),
            order,
            starts,
            size,
            packed.bits,
            packed.group_size,
            packed.zero_point,
            gated,
        )
        torch.testing.assert_close(actual, expected, atol=10 * TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@cpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_pairs_that_count_nothing_are_left_out(cpu: ModuleType, dtype: torch.dtype) -> None:
    """The pairs of experts 2 and 3 of 6 are summed; the others were never multiplied."""
    ids, weights = torch.tensor([[0, 2], [3, 5], [1, 0]], dtype=torch.int32), torch.rand(3, 2)
    x, weight = torch.randn(3, 32).to(dtype), torch.randn(2 * 16, 32).to(dtype)
    order, starts = cpu.sort_by_expert(ids, 6)
    pairs = torch.full((6, 16), float("nan"), dtype=dtype)
    products = cpu.experts_linear(x, weight, None, order, starts[2:5], False)
    pairs[[1, 2]] = products[[1, 2]]
    expected = torch.stack([weights[0, 1] * (weight[:16].float() @ x[0].float()), torch.zeros(16), torch.zeros(16)])
    expected[1] = weights[1, 0] * (weight[16:].float() @ x[1].float())
    own = torch.where((ids >= 2) & (ids < 4), weights, 0)
    combined = cpu.combine_experts(pairs, own)
    torch.testing.assert_close(combined.float(), expected, atol=10 * TOLERANCES[dtype], rtol=TOLERANCES[dtype])
