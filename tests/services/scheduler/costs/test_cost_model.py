"""The cost model learns from steps with costs by a known formula."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.costs.cost_model import StepCosts
from pagewire.services.scheduler.costs.prefill_budget import PrefillBudget
from pagewire.services.scheduler.values.step import StepWork
from tests.sweep import examples

coefficients = st.tuples(st.floats(1e-3, 0.05), st.floats(1e-5, 2e-3), st.floats(1e-5, 2e-3), st.floats(0, 2e-7))


def learned(truth: tuple[float, ...], noise: float = 0.0, hiccups: float = 0.0) -> StepCosts:
    """Learns from 200 steps, some with prompts. hiccups: how many of them take 50 ms longer."""
    costs, draw = StepCosts(), random.Random(7)
    for _ in range(200):
        work = StepWork(draw.choice([0, 1, 8, 32]))
        if draw.random() < 0.5 or not work.num_decodes:
            work.add_prompt(draw.randint(0, 4000), draw.randint(1, 400))
        seconds = seconds_of(work, truth) * draw.uniform(1 - noise, 1 + noise)
        costs.learn(work, seconds + (0.05 if draw.random() < hiccups else 0))
    return costs


def seconds_of(work: StepWork, truth: tuple[float, ...]) -> float:
    fixed, per_decode, per_token, per_pair = truth
    return fixed + per_decode * work.num_decodes + per_token * work.num_prompt_tokens + per_pair * work.num_pairs


@settings(deadline=None, max_examples=examples(60))
@given(coefficients)
def test_linear_costs_are_found(truth: tuple[float, ...]) -> None:
    costs = learned(truth)
    work = StepWork(16)
    assert costs.seconds(work) == pytest.approx(seconds_of(work, truth), rel=0.35)
    work.add_prompt(1000, 200)
    assert costs.seconds(work) == pytest.approx(seconds_of(work, truth), rel=0.35)


def test_noise_and_hiccups_do_not_mislead() -> None:
    truth = (0.003, 0.0005, 0.0004, 1e-7)
    costs, work = learned(truth, noise=0.15, hiccups=0.05), StepWork(8)
    work.add_prompt(500, 100)
    assert costs.seconds(work) == pytest.approx(seconds_of(work, truth), rel=0.3)


def test_results_that_come_in_pairs_do_not_make_steps_look_short() -> None:
    """One step seems to take long and the next one nearly nothing where the scheduler waits for a core."""
    costs = StepCosts()
    for i in range(200):
        costs.learn(StepWork(8), 0.030 if i % 2 else 0.010)
    assert costs.decode_seconds(8) == pytest.approx(0.020, rel=0.1)


def test_the_first_prompts_are_believed_at_once() -> None:
    """However many steps without prompts there were: else a long one would be computed whole, again and again."""
    costs = StepCosts()
    for _ in range(100):
        costs.learn(StepWork(1), 0.0035)
    work = StepWork(1)
    work.add_prompt(0, 2048)
    costs.learn(work, 0.9)
    assert costs.prompt_tokens_within(0.05, 0) < 250


def test_pieces_that_take_the_same_time_do_not_blur_what_tokens_and_pairs_cost() -> None:
    """Each step computes as much of one long prompt as fits into 50 ms: fewer tokens, the further it is."""
    truth = (0.003, 0.0005, 0.0004, 1e-7)
    costs, draw, start = learned(truth), random.Random(5), 0
    for _ in range(300):
        work = StepWork(1)
        num_tokens = int(costs.prompt_tokens_within(0.045, start))
        work.add_prompt(start, num_tokens)
        start = (start + num_tokens) % 8000
        costs.learn(work, seconds_of(work, truth) * draw.uniform(0.7, 1.3))
    for start, num_tokens in ((0, 100), (0, 2000), (6000, 50)):
        work = StepWork(4)
        work.add_prompt(start, num_tokens)
        assert costs.seconds(work) == pytest.approx(seconds_of(work, truth), rel=0.25)


def test_what_only_looks_like_an_accident_is_learned() -> None:
    """All steps become ten times as slow: that is known after a few of them."""
    truth = (0.003, 0.0005, 0.0004, 1e-7)
    costs, work = learned(truth), StepWork(1)
    work.add_prompt(0, 100)
    for _ in range(20):
        costs.learn(work, 10 * seconds_of(work, truth))
    assert costs.seconds(work) > 6 * seconds_of(work, truth)


def test_a_result_right_behind_another_says_little() -> None:
    """Two results at once: one step took twice as long, it seems, the next one nothing."""
    truth = (0.003, 0.0005, 0.0004, 1e-7)
    costs, work = learned(truth), StepWork(1)
    work.add_prompt(1000, 100)
    costs.learn(work, 2 * seconds_of(work, truth))
    costs.learn(work, 0.0002)
    assert costs.seconds(work) == pytest.approx(seconds_of(work, truth), rel=0.25)


def test_small_prompts_say_little_of_large_ones() -> None:
    """A larger one seems to cost less: that would be nothing per token."""
    costs = StepCosts()
    for num_tokens, seconds in ((32, 0.130), (60, 0.017)):
        work = StepWork(1)
        work.add_prompt(0, num_tokens)
        costs.learn(work, seconds)
    assert PrefillBudget(costs, 2048, 0.05).fit(0, 2048) <= 120


def test_costs_are_known_after_some_steps() -> None:
    costs = StepCosts()
    for i in range(20):
        assert costs.are_known == (i >= 16)
        costs.learn(StepWork(1), 0.01)


def test_hours_of_decoding_say_nothing_about_prompts() -> None:
    truth = (0.003, 0.0005, 0.0004, 1e-7)
    costs = learned(truth)
    before = costs.prompt_tokens_within(0.04, 0)
    for _ in range(30_000):
        costs.learn(StepWork(1), 0.0035)
    assert costs.prompt_tokens_within(0.04, 0) == pytest.approx(before, rel=0.3)


def test_while_nothing_is_known_nothing_is_limited() -> None:
    assert PrefillBudget(StepCosts(), 2048, 0.01).fit(0, 5000) == 2048


@settings(deadline=None, max_examples=examples(20))
@given(
    st.floats(0.001, 1), st.integers(0, 8000), st.integers(1, 4000), st.integers(1, 2048), st.sampled_from([0, 0.25])
)
def test_what_fits_takes_no_longer_than_there_is(
    seconds: float, start: int, wanted: int, tokens: int, kept: float
) -> None:
    costs = learned((0.003, 0.0005, 0.0004, 1e-7))
    fitting = PrefillBudget(costs, tokens, seconds).fit(start, wanted, kept=kept)
    assert 0 <= fitting <= min(wanted, tokens)
    assert costs.prompt_seconds(start, fitting) <= seconds * (1 - kept) + 1e-9


def test_of_a_budget_that_is_overspent_nothing_fits() -> None:
    """A newcomer is charged when it enters, and may thereby become one of those that have to do with less."""
    budget = PrefillBudget(StepCosts(), 0, 0.0)
    budget.spend(0, 2)
    assert budget.fit(24, 2) == budget.fit(24, 2, least=16) == 0
