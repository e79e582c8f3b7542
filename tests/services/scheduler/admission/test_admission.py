"""Admission by forecast, in simulated time: which requests are refused, how long the others wait, and when to come
back."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.tenant import Tenant
from pagewire.v1.common_pb2 import SamplingParams
from tests.fakes import FakeExecutor
from tests.services.scheduler.admission.simulation import Arrival, Simulation
from tests.services.scheduler.pure_line import PureLine

CAPACITY = 4.0  # requests per second of a Simulation with 16 rows
MAX_WAIT = 4.0


def arrivals(rate: float, seconds: float, start: float = 0.0) -> list[Arrival]:
    draw = random.Random(rate)
    found: list[Arrival] = []
    time = start
    while (time := time + draw.expovariate(rate)) < start + seconds:
        found.append(Arrival(time, draw.randint(50, 400), draw.randint(20, 200)))
    return found


def steps_to_first_token(requests: Sequence[Arrival]) -> list[int]:
    served = [one for one in requests if one.first_token_at is not None]
    return sorted(one.step_at_first_token - one.step_at_admission for one in served)


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_no_request_is_refused_where_there_is_room() -> None:
    simulation, light = Simulation(max_wait=MAX_WAIT), arrivals(CAPACITY / 2, 60)
    simulation.run(light)
    assert not sum(one.num_refusals for one in light)


def test_under_three_times_the_load_those_let_in_wait_as_at_capacity() -> None:
    full, threefold = arrivals(CAPACITY, 40), arrivals(3 * CAPACITY, 40)
    for requests in (full, threefold):
        Simulation(max_wait=MAX_WAIT).run(requests)
    refused = [one for one in threefold if one.num_refusals]
    assert len(refused) > len(threefold) / 2
    assert all(one.retry_delay is not None and 0 < one.retry_delay <= 90 for one in refused)
    # In steps of equal length that is what --max-queue-time allows; without admission they would grow for ever.
    at_capacity, overloaded = steps_to_first_token(full), steps_to_first_token(threefold)
    waits = sorted(one.first_token_at - one.time for one in threefold if one.first_token_at is not None)
    assert waits[int(0.95 * len(waits))] < 1.5 * MAX_WAIT
    assert overloaded[-1] < 2.5 * max(at_capacity[-1], MAX_WAIT / 0.025)
    # And as much is served.
    assert len(overloaded) > 0.9 * len(at_capacity)


def test_forecasts_are_right_on_the_whole() -> None:
    requests = arrivals(2 * CAPACITY, 40)
    Simulation(max_wait=MAX_WAIT).run(requests)
    errors = []
    for one in requests:
        if one.first_token_at is not None and one.forecast is not None and one.time > 10:
            assert one.admitted_at is not None
            errors.append(one.first_token_at - one.admitted_at - one.forecast.wait - one.forecast.prefill)
    assert abs(median(errors)) < 0.2
    # Outputs end by chance: a wait for sixteen ends is that uncertain.
    assert median([abs(error) for error in errors]) < 0.2 * MAX_WAIT


@pytest.mark.parametrize("num_arrivals", [60, 120])
def test_a_request_that_comes_back_in_time_is_taken(num_arrivals: int) -> None:
    simulation = Simulation(max_wait=MAX_WAIT, retries=True)
    known, burst = arrivals(CAPACITY / 2, 20), [Arrival(30 + i / 1000, 200, 100) for i in range(num_arrivals)]
    simulation.run(known + burst)
    refused = [one for one in burst if one.num_refusals]
    assert len(refused) > 0.4 * num_arrivals
    assert sum(one.num_refusals == 1 for one in refused) > 0.8 * len(refused)
    assert all(one.first_token_at is not None for one in burst)
    # One by one, not all at once.
    assert len({round(one.retry_delay or 0, 2) for one in refused}) > len(refused) / 2


def test_no_request_is_taken_that_would_miss_its_deadline() -> None:
    simulation, requests = Simulation(max_wait=0), arrivals(3 * CAPACITY, 40)
    for one in requests:
        one.timeout = 2.0
    simulation.run(requests)
    late = [one for one in requests if one.first_token_at is not None and one.first_token_at > one.time + 3]
    assert any(one.num_refusals for one in requests)
    assert len(late) < 0.1 * len(requests)


def test_a_cold_start_refuses_none() -> None:
    requests = [Arrival(0.0, 200, 100) for _ in range(200)]
    Simulation(max_wait=0.001).run(requests, until=0.001)
    assert not any(one.num_refusals for one in requests)


def test_a_request_that_would_not_wait_is_taken_however_long_its_prompt_takes() -> None:
    simulation = Simulation(max_wait=0.1)
    known = arrivals(1.0, 20)
    alone = Arrival(1000.0, 20_000, 1, timeout=0.5)
    simulation.run([*known, alone])
    assert alone.num_refusals == 0


@pytest.mark.parametrize("num_blocks", [100, 300])
def test_where_memory_is_short_forecasts_wait_for_it(num_blocks: int) -> None:
    simulation = Simulation(max_wait=MAX_WAIT, num_rows=64, num_blocks=num_blocks)
    requests = arrivals(12, 30)
    simulation.run(requests)
    late = [one for one in requests if one.time > 10]  # it takes some waits to learn by how much forecasts are short
    waits = sorted(one.first_token_at - one.time for one in late if one.first_token_at is not None)
    assert any(one.num_refusals for one in requests)
    assert simulation.line.replica.counts.num_preemptions, "that is what it is about"
    assert waits[int(0.9 * len(waits))] < 1.5 * MAX_WAIT


def test_long_prompts_are_forecast_to_be_overtaken() -> None:
    """Prompts of more than 128 tokens are long here, and are computed one after the other."""
    simulation, requests = Simulation(max_wait=MAX_WAIT, num_rows=64), arrivals(12, 40)
    simulation.run(requests)
    for is_long in (False, True):
        errors = [
            one.first_token_at - one.time - one.forecast.wait - one.forecast.prefill
            for one in requests
            if one.first_token_at is not None and one.forecast is not None and one.time > 10
            if (one.num_prompt_tokens > 128) == is_long
        ]
        assert len(errors) > 30
        assert abs(median(errors)) < 0.1 * MAX_WAIT


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300), st.integers(0, 2)), max_size=30),
    st.tuples(st.sampled_from("abcd"), st.integers(1, 300), st.integers(0, 2)),
)
def test_the_requests_before_another(waiting: list[tuple[str, int, int]], newcomer: tuple[str, int, int]) -> None:
    """Counts requests of its own tenant by policy, to the token where that is all of them; of each other tenant as many
    at most."""
    line = PureLine(FakeExecutor(max_num_batched_tokens=512), scheduling_policy="priority")
    for tenant, num_tokens, priority in waiting:
        line.add([1] * num_tokens, tenant=tenant, priority=priority)
    tenant, num_tokens, priority = newcomer
    request = Request(0, [1] * num_tokens, SamplingParams(priority=priority), tenant=Tenant(tenant))
    num, tokens = line.scheduler.waiting_before(request)
    own = [one for one in waiting if one[0] == tenant]
    before = [one for one in own if one[2] <= priority]
    others = [len([one for one in waiting if one[0] == other]) for other in set("abcd") - {tenant}]
    assert num == pytest.approx(len(before) + sum(min(len(before), other) for other in others))
    if tenant == "d":
        assert num == tokens == 0
    if len(before) == len(own) == len(waiting):
        assert tokens == sum(one[1] for one in waiting)
