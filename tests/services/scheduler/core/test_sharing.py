"""Requests that wait for each other when steps take time: decodes beside prompts, short prompts beside long ones,
tenants beside each other. The clock is the simulation's."""

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduling.simulation import BEFORE, Simulation, cpu_seconds, flood, warm
from pagewire.services.scheduler.placement.integrity import check_integrity
from pagewire.services.scheduler.values.step import StepWork
from tests.sweep import examples


def test_a_stream_goes_on_beside_long_prompts_and_a_chat_overtakes_them() -> None:
    before, after = flood(("", ""), **BEFORE), flood(("", ""))
    assert before.ttft > 10 and before.rate < 2, "this is what it is about"
    assert after.ttft < 0.15
    assert after.rate > 18, "a token in 50 ms"
    assert after.seconds < before.seconds / 0.88, "so much less is done where no step may take longer than 50 ms"
    relaxed = flood(("", ""), target_itl_ms=100)
    assert relaxed.seconds < before.seconds / 0.94


def test_another_tenants_flood_costs_half_at_most() -> None:
    of_order, fair = flood(("", "")), flood(("a", "b"))
    assert fair.ttft < 2 * fair.ttft_alone
    assert fair.rate > 0.5 * fair.rate_alone
    assert fair.seconds < of_order.seconds / 0.95


class BusyHost:
    """A device on a host that others use, too: slow, never twice the same, slower when a step is the first of its size,
    and with results that come late, so that the next one seems to take no time."""

    def __init__(self, slowness: float, seed: int) -> None:
        self._slowness = slowness
        self._draw = random.Random(seed)
        self._sizes: set[int] = set()
        self._owed = 0.0

    def __call__(self, work: StepWork) -> float:
        seconds = cpu_seconds(work)
        if work.num_prompt_tokens:
            seconds += 0.010
            if (size := work.num_prompt_tokens // 8) not in self._sizes:
                self._sizes.add(size)
                seconds += 0.045
        seconds *= self._slowness * math.exp(self._draw.gauss(0, 0.2))
        if self._owed:
            seconds, self._owed = max(0.0002, seconds - self._owed), 0.0
        elif self._draw.random() < 0.05:
            self._owed = 0.03 * self._slowness
            seconds += self._owed
        return seconds


def test_another_tenants_flood_costs_half_at_most_where_steps_with_prompts_cost_more() -> None:
    """However few tokens of a prompt are in them: so there are fewer of them."""
    fair = flood(("a", "b"), step_seconds=BusyHost(1.0, 1))
    assert fair.ttft < 2 * fair.ttft_alone
    assert fair.rate > 0.5 * fair.rate_alone
    assert fair.seconds < flood(("", ""), step_seconds=BusyHost(1.0, 1)).seconds, "nor does the flood lose by it"


@pytest.mark.parametrize(("slowness", "seed"), [(1.0, 3), (2.2, 1), (2.2, 2)])
def test_no_step_is_held_up_on_a_busy_host(slowness: float, seed: int) -> None:
    """Twice, with a minute of decoding in between: what is known then is of another time. Where a step has hardly room
    for a piece, a chat still overtakes the flood."""
    simulation = Simulation(step_seconds=BusyHost(slowness, seed))
    start = warm(simulation)
    for _ in range(2):
        stream = simulation.add(start, 50, 8000)
        long = [simulation.add(start + 1, 4000, 16) for _ in range(3)]
        chat = simulation.add(start + 1.5, 60, 16)
        num_steps = len(simulation.steps)
        while not all(one.times for one in long):
            simulation.run(until=simulation.now + 0.01)
        mixed = [s for work, s in simulation.steps[num_steps:] if work.num_decodes and work.num_prompt_tokens]
        assert sorted(mixed)[int(0.95 * len(mixed))] < 0.15
        assert max(mixed) < 0.4
        assert chat.ttft < 0.6
        assert simulation.now - start < 55 * slowness, "and the flood goes on"
        simulation.run(until=simulation.now + 10)
        simulation.scheduler.abort(stream.request)
        start = simulation.now + 1


@pytest.mark.parametrize("target_itl_ms", [30, 100])
def test_steps_with_decodes_keep_to_the_target(target_itl_ms: float) -> None:
    simulation = Simulation(target_itl_ms=target_itl_ms)
    start = warm(simulation)
    num_steps = len(simulation.steps)
    for i in range(4):
        simulation.add(start, 40, 400)
        simulation.add(start + 0.2 * i, 2000, 8)
    simulation.run()
    mixed = [seconds for work, seconds in simulation.steps[num_steps:] if work.num_decodes and work.num_prompt_tokens]
    assert len(mixed) > 20
    assert max(mixed) < 1.25 * target_itl_ms / 1000


def test_a_burst_of_short_prompts_is_admitted_in_longer_steps() -> None:
    """Steps are longer while more short prompts wait than requests decode, unless a target was set."""

    def mixed_steps(**options: Any) -> list[float]:
        simulation = Simulation(**options)
        start = warm(simulation)
        num_steps = len(simulation.steps)
        simulation.add(start, 40, 400)
        for _ in range(32):
            simulation.add(start + 0.2, 128, 32)
        simulation.run()
        steps = simulation.steps[num_steps:]
        return [seconds for work, seconds in steps if work.num_decodes and work.num_prompt_tokens]

    burst, strict = mixed_steps(), mixed_steps(target_itl_ms=50)
    assert 0.1 < max(burst) < 0.25
    assert max(strict) < 0.0625
    assert len(burst) < 0.8 * len(strict)


def test_prompts_go_on_where_decodes_alone_exceed_the_target() -> None:
    simulation = Simulation(target_itl_ms=1)
    start = warm(simulation)
    simulation.add(start, 40, 2000)
    prompt = simulation.add(start + 0.5, 1000, 1)
    simulation.run()
    assert prompt.ttft < 2


def test_a_request_that_is_alone_gets_longer_steps() -> None:
    simulation = Simulation()
    start = warm(simulation)
    num_steps = len(simulation.steps)
    simulation.add(start, 5000, 1)
    simulation.run()
    seconds = [seconds for work, seconds in simulation.steps[num_steps:] if work.num_prompt_tokens]
    assert 0.15 < max(seconds) < 0.25


@pytest.mark.parametrize("num_prompts", [1, 16])
def test_a_newcomer_has_its_turn_within_another_tenants_long_prompt(num_prompts: int) -> None:
    """The second and third chats of the newcomer have their turns, too."""
    simulation = Simulation()
    start = warm(simulation)
    alone = simulation.add(start, 37, 8, "other")
    simulation.run()
    start = simulation.now + 1
    for _ in range(num_prompts):
        simulation.add(start, 6000, 16, "flood")
    chats = [simulation.add(start + 1.03 + number, 37, 8, "other") for number in range(3)]
    for chat in chats:
        simulation.run(until=chat.arrival)
        num_steps = len(simulation.steps)
        while not chat.times:
            simulation.run(until=simulation.now + 0.001)
        assert len(simulation.steps) - num_steps <= 3, "those in flight, and its own"
        assert chat.ttft < 2 * alone.ttft + 0.5


def test_a_long_prompt_goes_on_however_many_short_ones_come() -> None:
    """A long prompt keeps a quarter of every step: it takes four times as long as alone, and somewhat more."""
    alone = Simulation()
    long_alone = alone.add(warm(alone), 4000, 1)
    alone.run()
    simulation = Simulation()
    start = warm(simulation)
    long = simulation.add(start, 4000, 1)
    for i in range(2000):
        simulation.add(start + 0.001 + 0.02 * i, 100, 1)
    simulation.run(until=start + 40)
    assert long.ttft < 6 * long_alone.ttft


def test_as_many_prompts_are_computed_at_once_as_may_be() -> None:
    simulation = Simulation(max_num_partial_prefills=2, max_long_partial_prefills=1)
    start = warm(simulation)
    simulation.add(start, 20, 1000)
    for i in range(8):
        simulation.add(start + 0.1, 1500 if i % 2 else 400, 4)
    most_long = most = 0
    while simulation.now < start + 6:
        simulation.run(until=simulation.now + 1e-6)
        running = [
            r for r in simulation.scheduler.replicas[0].running if 0 < r.num_computed_tokens < r.num_prompt_tokens
        ]
        most, most_long = max(most, len(running)), max(most_long, sum(r.num_prompt_tokens == 1500 for r in running))
    assert (most, most_long) == (2, 1)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=12),
    st.lists(
        st.tuples(st.integers(1, 600), st.integers(1, 40), st.sampled_from(["", "a", "b"])), min_size=1, max_size=12
    ),
    st.sampled_from([None, 0.0, 1.0, 30.0]),
)
def test_all_are_served_however_long_steps_seem_to_take(
    seconds: list[float], requests: list[tuple[int, int, str]], target: float | None
) -> None:
    """All are served even where the costs that are learned make no sense, and every second request comes later."""
    draw = itertools.cycle(seconds)
    simulation = Simulation(step_seconds=lambda work: next(draw), max_num_seqs=4, num_blocks=64, target_itl_ms=target)
    for i, (num_prompt_tokens, max_tokens, tenant) in enumerate(requests):
        simulation.add(i % 2 * seconds[0], num_prompt_tokens, max_tokens, tenant)
    simulation.run(until=10_000)
    assert all(len(one.times) == one.request.sampling_params.max_tokens for one in simulation.streams)
    check_integrity(simulation.scheduler)


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def served(simulation: Simulation, tenant: str) -> float:
    """Tokens of prompts that were computed, and twice those of outputs."""
    streams = [stream for stream in simulation.streams if stream.request.tenant.name == tenant]
    return sum(stream.request.num_prompt_tokens + 2 * len(stream.times) for stream in streams if stream.times)


def backlog(
    simulation: Simulation, start: float, num: int, tenant: str, weight: float, tokens: tuple[int, int]
) -> None:
    for _ in range(num):
        simulation.add(start, *tokens, tenant, weight)


def test_equal_tenants_are_served_alike_whatever_they_send() -> None:
    simulation = Simulation(max_num_seqs=16)
    start = warm(simulation)
    kinds = {"long prompts": (1000, 8), "chats": (100, 100), "short": (30, 20), "texts": (20, 300)}
    for tenant, tokens in kinds.items():
        backlog(simulation, start, 600, tenant, 1, tokens)
    simulation.run(until=start + 30)
    assert jain([served(simulation, tenant) for tenant in kinds]) > 0.95


def test_tenants_are_served_by_weight() -> None:
    simulation = Simulation(max_num_seqs=16)
    start = warm(simulation)
    for tenant, weight in (("heavy", 3.0), ("light", 1.0)):
        backlog(simulation, start, 1000, tenant, weight, (100, 40))
    simulation.run(until=start + 30)
    assert served(simulation, "heavy") / served(simulation, "light") == pytest.approx(3, rel=0.15)


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    simulation = Simulation(max_num_seqs=16)
    start = warm(simulation)
    simulation.add(start, 20, 4, "late")
    backlog(simulation, start, 1000, "early", 1, (100, 40))
    backlog(simulation, start + 10, 1000, "late", 1, (100, 40))
    simulation.run(until=start + 10)
    before = served(simulation, "early"), served(simulation, "late")
    simulation.run(until=start + 30)
    gained = [served(simulation, tenant) - was for tenant, was in zip(("early", "late"), before, strict=True)]
    assert jain(gained) > 0.95


def test_a_tenant_gets_a_row_that_others_have() -> None:
    """A tenant's streams have all rows for a minute; another's chat takes one of them."""
    simulation = Simulation(max_num_seqs=8)
    start = warm(simulation)
    for _ in range(50):
        simulation.add(start, 20, 4000, "a")
    chat = simulation.add(start + 1, 20, 10, "b")
    simulation.run(until=start + 3)
    assert chat.ttft < 0.2 and len(chat.times) == 10


def test_no_tenant_runs_more_than_it_may() -> None:
    simulation = Simulation(max_num_seqs=8, max_running_per_tenant=2)
    start = warm(simulation)
    backlog(simulation, start, 20, "a", 1, (20, 100))
    simulation.run(until=start + 0.2)
    assert simulation.scheduler.num_running == 2
    chat = simulation.add(start + 0.3, 20, 10, "b")
    simulation.run()
    assert chat.ttft < 0.2
    assert all(len(stream.times) == stream.request.sampling_params.max_tokens for stream in simulation.streams)
