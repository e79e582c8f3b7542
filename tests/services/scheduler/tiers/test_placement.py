"""The choice among replicas counts what loading costs."""

from dataclasses import replace

import pytest

from pagewire.services.scheduler.placement.replica_load import NOTHING_DEFERRED, Fit, Load, UnknownCosts
from tests.fakes import FakeExecutor, FakeTier
from tests.services.scheduler.pure_line import PureLine

PROMPT = list(range(1, 42))


def pair(*tiers: FakeTier) -> PureLine:
    """Returns a line of as many executors, with nothing in their memory."""
    return PureLine(*(FakeExecutor(block_size=4, tier=tier) for tier in tiers), placement="cache_aware")


def filled() -> FakeTier:
    """Returns a tier that holds the blocks of the prompt."""
    tier = FakeTier()
    line = pair(tier)
    line.add(PROMPT, max_tokens=1)
    line.run()
    return tier


@pytest.mark.parametrize("index", [0, 1])
def test_a_request_goes_where_its_prompt_can_be_loaded(index: int) -> None:
    line = pair(*([FakeTier(), filled()] if index else [filled(), FakeTier()]))
    request = line.add(PROMPT, max_tokens=1)
    line.run()
    assert request.num_cached_tokens == 40
    assert line.executors[index].num_executed_tokens == 1


def test_a_shared_tier_serves_every_replica() -> None:
    tier = filled()
    line = pair(tier, tier)
    requests = [line.add([*PROMPT, i], max_tokens=30, ignore_eos=True) for i in range(2)]
    line.run()
    assert all(executor.num_executed_tokens for executor in line.executors), "both serve one"
    assert [request.num_cached_tokens for request in requests] == [40, 40]


def test_what_is_cached_is_better_than_what_has_to_be_loaded() -> None:
    line = pair(filled(), FakeTier())
    first = line.add(PROMPT[:20], max_tokens=1)
    line.run()
    assert first.num_cached_tokens == 16 and line.executors[0].num_executed_tokens == 4
    again = line.add(PROMPT[:20], max_tokens=1)
    line.run()
    assert again.num_cached_tokens == 16 and line.executors[0].num_executed_tokens == 8


@pytest.mark.parametrize(("seconds", "num_running"), [(1.0, 0), (39.0, 0), (41.0, 0), (41.0, 1), (1000.0, 1)])
def test_what_is_slow_to_load_is_computed(seconds: float, num_running: int) -> None:
    load = Load(num_running, 8, 100, 4.0, 0, 0.0, 64.0)
    fit = Fit(num_tokens=41, num_cached=0, num_blocks=11, output_tokens=1.0)
    computed = load.seconds(fit, NOTHING_DEFERRED, UnknownCosts())
    fit = replace(fit, num_loadable=40, load_seconds=seconds)
    loaded = load.seconds(fit, NOTHING_DEFERRED, UnknownCosts())
    assert loaded <= computed
    assert (loaded < computed) is (seconds < 40 * (1 + num_running))


def test_the_index_forgets_what_is_gone() -> None:
    line = pair(filled(), filled())
    assert len(line.fleet.tier_index) == 10
    line.lose(0)
    assert len(line.fleet.tier_index) == 10
    tier = line.executors[1].tier
    assert tier is not None
    tier.forget(None)
    line.tell_tiers()
    assert len(line.fleet.tier_index) == 0
