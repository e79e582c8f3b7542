"""The sampling ops on the CPU against their reference, and the reference against what it promises."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.ops import NOT_A_NUMBER
from pagewire.kernels.reference.sampling import GROUP_SIZE, gumbel_noise
from pagewire.kernels.sampling_parameters import FloatParameter
from tests.kernels.implementations import fallback, native
from tests.kernels.sampling_batches import (
    BROKEN_LINES,
    Row,
    SamplingBatch,
    assert_broken,
    assert_same,
    assert_same_rows,
    broken_logits,
    drafted_rows,
    float_parameters,
    is_changed_by,
    lookup_args,
    random_logits,
    random_masks,
)
from tests.sweep import examples

pytestmark = pytest.mark.pairs

# 0.999 quantiles of the chi-square distribution, by degrees of freedom
CHI_SQUARE = {2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5}

IMPLEMENTATIONS = [pytest.param(native, id="cpp"), pytest.param(fallback, id="torch")]
ALL = [*IMPLEMENTATIONS, pytest.param(reference, id="reference")]


def check(logits: Tensor, lines: list[Row]) -> None:
    """C++ and torch choose the tokens of the reference."""
    expected = SamplingBatch(logits, lines)
    wanted = reference.sample_tokens(*expected.args())
    for implementation in (native, fallback):
        actual = SamplingBatch(logits, lines)
        assert_same(actual, implementation.sample_tokens(*actual.args()), expected, wanted)


def draws(logits: Tensor, count: int, **parameters: float) -> Tensor:
    """Tokens of `count` rows with these logits [vocab_size], alike but for their seeds and positions."""
    lines = [Row(seed=index // 50, position=index % 50, **parameters) for index in range(count)]  # type: ignore[arg-type]
    return native.sample_tokens(*SamplingBatch(logits.expand(count, -1), lines).args())


# The CPU implementation against the reference

lines_strategy = st.lists(
    st.builds(
        Row,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 2, 50, 290, 299]),
        top_p=st.sampled_from([1.0, 0.9, 0.31, 0.02, 1e-8]),
        min_p=st.sampled_from([0.0, 0.003, 0.17, 1.0]),
        seed=st.integers(-(2**63), 2**63 - 1),
        position=st.integers(0, 30),
        padding=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=5,
)


@given(lines_strategy, st.integers(0, 2**32), st.sampled_from([300, 384]), st.sampled_from([0.1, 1.0, 6.0]))
@settings(max_examples=examples(100), deadline=None)
def test_every_mix_gets_the_tokens_of_the_reference(lines: list[Row], seed: int, vocab_size: int, scale: float):
    check(random_logits(len(lines), vocab_size, seed=seed, scale=scale), lines)


@given(lines_strategy, st.integers(0, 2**32))
@settings(max_examples=examples(50), deadline=None)
def test_equal_and_impossible_tokens(lines: list[Row], seed: int):
    logits = torch.randint(-1, 3, (len(lines), 300), generator=torch.Generator().manual_seed(seed)).float()
    logits[logits < 0] = -torch.inf
    logits[:, 150:] *= -1.0  # zeros of both signs
    logits[:, 150:] = logits[:, 150:].nan_to_num(posinf=-torch.inf)
    check(logits, lines)


@given(lines_strategy, st.integers(0, 2**32), st.lists(st.integers(0, 9), min_size=5, max_size=5))
@settings(max_examples=examples(40), deadline=None)
def test_positions_behind_drafts(lines: list[Row], seed: int, offsets: list[int]):
    """Drafted positions draw with their own noise, and leave the row as it is."""
    logits = random_logits(len(lines), 300, seed=seed, scale=1.0)
    shifted = [replace(line, position=line.position + offset) for line, offset in zip(lines, offsets, strict=False)]
    wanted = reference.sample_tokens(*SamplingBatch(logits, shifted).args())
    lines = [replace(line, offset=offset) for line, offset in zip(lines, offsets, strict=False)]
    expected = SamplingBatch(logits, lines, drafts=True)
    for implementation in (native, fallback, reference):
        actual = SamplingBatch(logits, lines, drafts=True)
        assert_same(actual, implementation.sample_tokens(*actual.args()), expected, wanted)


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()).filter(lambda request: request[1] <= request[0]),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**32),
)
@settings(max_examples=examples(60), deadline=None)
def test_right_drafts_are_accepted(requests: list[tuple[int, int, bool]], seed: int):
    actual, expected = drafted_rows(requests, seed), drafted_rows(requests, seed)
    native.accept_tokens(*actual.args())
    reference.accept_tokens(*expected.args())
    assert_same_rows(actual, expected)
    gained = [0 if is_padding or not count else min(num_right + 1, count) for count, num_right, is_padding in requests]
    assert actual.num_gained.tolist() == gained
    before = drafted_rows(requests, seed)
    for index, row in enumerate(actual.rows.tolist()):
        if row >= 0:
            first, start = int(before.num_tokens[row]), int(before.sample_start_loc[index])
            known = before.token_ids[row, :first].tolist() + before.sampled[start : start + gained[index]].tolist()
            assert actual.token_ids[row, : actual.num_tokens[row]].tolist() == known
            taken_back = before.num_computed_tokens[row] - actual.num_computed_tokens[row]
            assert taken_back == requests[index][0] - gained[index]


@pytest.mark.parametrize("implementation", ALL)
def test_what_is_not_a_number_ends_the_drafts_that_are_accepted(implementation: ModuleType):
    batch = drafted_rows([(4, 4, False), (1, 1, False)])
    batch.sampled[2] = batch.sampled[4] = NOT_A_NUMBER
    implementation.accept_tokens(*batch.args())
    assert batch.num_gained.tolist() == [3, 1]
    assert [int(batch.token_ids[row, batch.num_tokens[row] - 1]) for row in batch.rows.tolist()] == [0, 0]


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4)


@given(TEXTS, st.integers(1, 6), st.integers(1, 6), st.integers(0, 16))
@settings(max_examples=examples(100), deadline=None)
def test_what_followed_the_last_tokens_before_is_found(texts: list[list[int]], a: int, b: int, wanted: int):
    num_wanted = [(wanted + index) % 17 for index in range(len(texts))]
    actual, expected = (lookup_args(texts, num_wanted, max(a, b), min(a, b)) for _ in range(2))
    native.look_up_drafts(*actual)
    reference.look_up_drafts(*expected)
    for ours, theirs in zip(actual[:5], expected[:5], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize(
    ("text", "bounds", "drafts", "found"),
    [
        ([5, 7, 9, 2, 5, 7], (3, 1), [9, 2, 5, 7], 4),
        ([5, 7, 5, 7], (3, 1), [5, 7, 5, 7], 4),
        ([1, 2, 3, 8, 3, 9, 2, 3], (2, 1), [8, 3, 9, 2], 4),  # the longer match, though it is older
        ([3, 8, 3, 9, 3], (2, 1), [9, 3, 9, 3], 2),  # the later one; one token in common promises no more than two
        ([1, 2, 3, 8, 3], (3, 2), None, 0),
        ([4], (3, 1), None, 0),
    ],
)
def test_of_all_places_the_latest_of_the_longest_counts(
    implementation: ModuleType, text: list[int], bounds: tuple[int, int], drafts: list[int] | None, found: int
):
    rows, num_wanted, token_ids, num_tokens, num_found, *_ = lookup_args([text], [4])
    implementation.look_up_drafts(rows, num_wanted, token_ids, num_tokens, num_found, *bounds)
    assert num_found.tolist() == [found]
    assert token_ids[0, : len(text) + 4].tolist() == text + (drafts or [text[-1]] * 4)


def test_accept_tokens_checks_dtypes():
    batch = drafted_rows([(2, 1, False)])
    with pytest.raises(TypeError, match=r"accept_tokens: must be torch\.int64"):
        native.accept_tokens(batch.sampled.int(), *batch.args()[1:])


MIXED_LINES = [Row(temperature=0.0), Row(seed=1), Row(top_k=7, seed=2), Row(temperature=0.6, top_p=0.5, seed=3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [3, 128, 1000, 20_011])
def test_dtypes_and_vocabularies_of_any_size(dtype: torch.dtype, vocab_size: int):
    """The largest is shared by threads, the smallest is less than a group, or a vector."""
    check(
        random_logits(4, vocab_size, scale=1.0).to(dtype), [replace(line, top_k=line.top_k % 5) for line in MIXED_LINES]
    )


def test_logits_in_rows_and_columns_of_any_stride():
    logits = random_logits(8, 700)
    check(logits[::2, 50:633], MIXED_LINES)
    check(logits[0].expand(4, -1), MIXED_LINES)
    check(logits.T[:4], [replace(line, top_k=0) for line in MIXED_LINES])


@pytest.mark.parametrize("implementation", ALL)
def test_nan_is_no_token_wherever_it_stands(implementation: ModuleType):
    """The other rows of the batch have the tokens that they have without it."""
    logits = random_logits(6, 300)
    lines = [Row(temperature=0.0), Row(seed=1), Row(top_k=5, top_p=0.9, seed=2)] * 2
    whole = implementation.sample_tokens(*SamplingBatch(logits, lines).args())
    logits[0, 299] = logits[1, 130] = logits[1, 200] = logits[2, 0] = torch.nan
    batch = SamplingBatch(logits, lines)
    assert_broken(batch, sampled := implementation.sample_tokens(*batch.args()))
    assert sampled.tolist() == [NOT_A_NUMBER] * 3 + whole[3:].tolist()


@pytest.mark.parametrize("implementation", ALL)
def test_broken_models_yield_ids_of_the_vocabulary_or_none(implementation: ModuleType):
    for logits in broken_logits(200):
        for lines in BROKEN_LINES:
            batch = SamplingBatch(logits, lines)
            assert_broken(batch, implementation.sample_tokens(*batch.args()))


@pytest.mark.parametrize("parameter", FloatParameter, ids=lambda parameter: parameter.name.lower())
@pytest.mark.parametrize("implementation", ALL)
def test_every_parameter_changes_something(implementation: ModuleType, parameter: FloatParameter):
    """No parameter is named here: a new one fails for each implementation that lacks it."""
    assert is_changed_by(parameter, implementation.sample_tokens, implementation.apply_penalties)


def test_penalties_change_each_seen_token_once():
    logits = random_logits(4, 300)
    rows, batch_indices = torch.tensor([2, 0, 4], dtype=torch.int32), torch.tensor([3, 0, 1], dtype=torch.int32)
    token_ids = torch.randint(0, 40, (5, 600), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    num_tokens, num_prompt_tokens = torch.tensor([1, 5, 550, 7, 60]), torch.tensor([1, 3, 400, 2, 0])
    floats = float_parameters(
        5,
        repetition_penalty=[1.2, 1, 0.7, 1, 1.5],
        presence_penalty=[0.3, 0, 0, 1, 0.5],
        frequency_penalty=[0.1, 0.2, 0.3, 0.4, -0.5],
    )
    columns_of_rows: list[Any] = [batch_indices, rows, floats, token_ids, num_tokens, num_prompt_tokens]
    for offsets in (None, torch.tensor([0, 7, 2], dtype=torch.int32)):
        actual, expected, arguments = logits.clone(), logits.clone(), [*columns_of_rows, offsets]
        native.apply_penalties(actual, *arguments)
        reference.apply_penalties(expected, *arguments)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 300])
def test_masked_tokens_have_no_probability(vocab_size: int):
    logits, batch_indices = random_logits(4, vocab_size), torch.tensor([2, 0], dtype=torch.int32)
    masks = random_masks(2, vocab_size)
    wanted = logits.clone()
    for index, mask in zip(batch_indices.tolist(), masks.tolist(), strict=True):
        for token_id in range(vocab_size):
            if not mask[token_id // 32] >> (token_id % 32) & 1:
                wanted[index, token_id] = -torch.inf
    for implementation in (native, fallback):
        actual = logits.clone()
        implementation.mask_tokens(actual, batch_indices, masks)
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 20, 300])
def test_logprobs_with_ties(num_top: int, dtype: torch.dtype, implementation: ModuleType):
    logits = random_logits(5, 300)
    logits[1] = logits[1].round()
    logits[2], logits[2, 200] = -torch.inf, 1.0
    logits[3, ::2], logits[3, 1::2] = 0.0, -0.0
    logits = logits.to(dtype)
    token_ids = torch.tensor([5, 299, 200, 7, 250])
    actual = implementation.token_logprobs(logits, token_ids, num_top)
    expected = reference.token_logprobs(logits, token_ids, num_top)
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[2], expected[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logprobs_of_a_broken_model_name_ids_of_the_vocabulary(implementation: ModuleType):
    for logits in broken_logits(200):
        ids, logprobs, _ = implementation.token_logprobs(logits, torch.tensor([7, 7]), 5)
        assert ((ids >= 0) & (ids < 200)).all()
        assert logprobs[logits.isnan().any(-1)].isnan().all()


# Truncation: which tokens are drawn at all, of a distribution flat enough that each shows in 1500 draws

NUM_TOKENS = 10


def flat_logits(seed: int) -> Tensor:
    return torch.linspace(0, 1.2, NUM_TOKENS)[torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(seed))]


@given(st.integers(0, 10_000), st.integers(1, NUM_TOKENS))
@settings(max_examples=examples(15), deadline=None)
def test_top_k_keeps_the_k_most_probable(seed: int, k: int):
    logits = flat_logits(seed)
    assert set(draws(logits, 1500, top_k=k).tolist()) == set(logits.argsort(descending=True)[:k].tolist())


@given(st.integers(0, 10_000), st.floats(0.01, 0.999))
@settings(max_examples=examples(15), deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed: int, top_p: float):
    logits = flat_logits(seed)
    order = logits.argsort(descending=True)
    mass = logits.double().softmax(0)[order].cumsum(0)
    if (mass - top_p).abs().min() < 1e-5:
        return  # rounding decides
    kept = int((mass < top_p).sum()) + 1
    assert set(draws(logits, 1500, top_p=top_p).tolist()) == set(order[:kept].tolist())


@given(st.integers(0, 10_000), st.floats(0.2, 1.0))
@settings(max_examples=examples(15), deadline=None)
def test_min_p_keeps_what_is_probable_enough_beside_the_best(seed: int, min_p: float):
    logits = flat_logits(seed)
    ratios = (logits - logits.max()).double().exp()
    if (ratios - min_p).abs().min() < 1e-5 and min_p < 1:
        return  # rounding decides
    assert set(draws(logits, 1500, min_p=min_p).tolist()) == set((ratios >= min_p).nonzero().squeeze(1).tolist())


# Distribution


def chi_square(tokens: Tensor, probs: dict[int, float]) -> float:
    """Returns chi-square of the tokens' counts, all of which are among probs' keys; probs need not be normalised."""
    counts = np.array([int((tokens == token_id).sum()) for token_id in probs])
    assert counts.sum() == len(tokens), "no other token was drawn"
    expected = np.array(list(probs.values())) / sum(probs.values()) * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


def spread(probs: dict[int, float], vocab_size: int) -> Tensor:
    logits = torch.full((vocab_size,), -40.0)
    logits[list(probs)] = torch.tensor(list(probs.values())).log()
    return logits


PROBS = {0: 0.3, 1: 0.05, GROUP_SIZE - 1: 0.2, GROUP_SIZE: 0.15, 2 * GROUP_SIZE + 5: 0.1, 3 * GROUP_SIZE + 15: 0.2}
VOCAB_SIZE = 3 * GROUP_SIZE + 16


def test_draws_follow_the_distribution():
    assert chi_square(draws(spread(PROBS, VOCAB_SIZE), 10_000), PROBS) < CHI_SQUARE[5]


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 1), (0.6, 3), (0.8, 4), (0.9, 5)])
def test_draws_after_rejections_follow_the_distribution_of_the_nucleus(top_p: float, num_kept: int):
    """Tokens of probability 0.2 stay together, so 0.6 keeps three of 0.3, 0.2, 0.2, 0.15, 0.1, 0.05."""
    kept = dict(sorted(PROBS.items(), key=lambda item: -item[1])[:num_kept])
    tokens = draws(spread(PROBS, VOCAB_SIZE), 10_000, top_p=top_p)
    assert chi_square(tokens, kept) < CHI_SQUARE.get(num_kept - 1, 1e-9)


def test_draws_follow_the_distribution_with_everything_on():
    """Min-p drops 0.05, top-k the 0.1; of what is left, 0.85, three make up 82 %."""
    kept = {token_id: prob for token_id, prob in PROBS.items() if prob >= 0.2}
    tokens = draws(spread(PROBS, VOCAB_SIZE), 10_000, top_k=4, min_p=0.2, top_p=0.8)
    assert chi_square(tokens, kept) < CHI_SQUARE[2]


# Noise


def test_noise_is_standard_gumbel():
    noise = np.concatenate([gumbel_noise(torch.tensor(i), torch.tensor(3 * i), 0, 500).double() for i in range(200)])
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.03)
    # P(noise < x) = exp(-exp(-x))
    for x in (-1.0, 0.0, 1.0, 3.0):
        assert (noise < x).mean() == pytest.approx(np.exp(-np.exp(-x)), abs=0.01)


def test_noise_differs_by_seed_position_and_draw_and_is_uncorrelated():
    keys = [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (-1, 0, 0),
        (2**62, 5, 0),
        (0x123456789, 1_000_000, 0),
        (0, 0, 1),
        (0, 0, 9),
    ]
    noise = [gumbel_noise(torch.tensor(seed), torch.tensor(pos), draw, 4000).numpy() for seed, pos, draw in keys]
    assert np.abs(np.corrcoef(noise) - np.eye(len(keys))).max() < 0.06


def splitmix_gumbel(seed: int, position: int, column: int) -> float:
    """The generator in plain integers: SplitMix64's finalizer over a counter."""
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix((mix((seed * gamma + gamma) & mask) + position * gamma) & mask)
    uniform = ((mix((key + (column + 1) * gamma) & mask) >> 12) + 0.5) * 2**-52
    return -math.log(-math.log(uniform))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20), st.integers(0, 5), st.integers(0, 1500))
@settings(max_examples=examples(100), deadline=None)
def test_noise_is_a_fixed_function(seed: int, position: int, draw: int, column: int):
    """Resumed requests continue their stream on any device and in any later version: the function is a promise."""
    count = column + 3
    noise = gumbel_noise(torch.tensor(seed), torch.tensor(position), draw, count)[column]
    assert float(noise) == pytest.approx(splitmix_gumbel(seed, position, draw * count + column), abs=1e-5)
    assert splitmix_gumbel(42, 0, 0) == pytest.approx(-1.0451110527)
