"""Pacing, against a simulated device whose clock is the test's."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.pacing import Pacer

LATENCY = 0.002  # of a message and its decision, seconds


@dataclass
class Run:
    """What a device saw of some steps, one entry per step, seconds."""

    waited: list[float]  # from its decision until the device took it
    idle: list[float]  # of the device, before it

    def last_half(self) -> "Run":
        half = len(self.waited) // 2
        return Run(self.waited[half:], self.idle[half:])


def simulate(pacer: Pacer, steps: Iterable[tuple[int, float, float]]) -> Run:
    """A scheduler that always has a next step, and a device that executes them.

    steps: tokens; seconds on the device; seconds from decision to arrival at the device. Results arrive at once.
    """
    run = Run([], [])
    now = free_at = 0.0  # the scheduler's clock; when the device is done with all it has
    ends: list[tuple[float, float, float]] = []  # of the steps in flight: end, seconds, idle
    for num_tokens, seconds, latency in steps:
        while True:
            while ends and (len(ends) == 2 or ends[0][0] <= now):
                end, execute_seconds, idle = ends.pop(0)
                now = max(now, end)
                pacer.on_result(execute_seconds, idle, now)
            hold = pacer.seconds_to_hold(now)
            if hold == 0:
                break
            now = min(now + hold + 1e-9, ends[0][0])  # timers are never early
        pacer.on_sent(num_tokens, now)
        arrival = now + latency
        start = max(arrival, free_at)
        run.waited.append(start - now)
        run.idle.append(start - free_at)
        ends.append((start + seconds, seconds, start - free_at))
        free_at = start + seconds
    return run


@pytest.mark.parametrize("seconds", [0.03, 0.1, 2.0])
def test_steady_steps_are_decided_shortly_before_they_run(seconds: float) -> None:
    run = simulate(Pacer(2), [(64, seconds, LATENCY)] * 400).last_half()
    assert sum(run.waited) / len(run.waited) < 3 * LATENCY
    assert sum(run.idle) / len(run.idle) < 0.2 * LATENCY


# Tokens, seconds, and how long its message takes.
ANY_STEP = st.tuples(st.integers(0, 2048), st.floats(1e-4, 3.0), st.floats(0, LATENCY))


@given(st.lists(ANY_STEP, min_size=1, max_size=60))
def test_the_device_never_waits_longer_than_a_message_takes(steps: list[tuple[int, float, float]]) -> None:
    run = simulate(Pacer(2), steps)
    assert max(run.idle) <= LATENCY + 1e-9


def test_steps_that_cannot_be_foreseen_are_decided_early_at_last() -> None:
    """Sizes tell nothing: the lead grows until few steps are late."""
    run = simulate(Pacer(2), [(64, 0.03 if i % 2 else 0.09, LATENCY) for i in range(600)]).last_half()
    assert sum(idle > 0 for idle in run.idle) < 0.2 * len(run.idle)


def test_short_steps_are_decided_at_once() -> None:
    run = simulate(Pacer(2), [(1, 0.012, LATENCY)] * 50)
    assert run.waited[2:] == pytest.approx([0.012] * 48)


def test_sizes_have_guesses_of_their_own() -> None:
    long, short = (2048, 1.0, LATENCY), (32, 0.05, LATENCY)
    run = simulate(Pacer(2), [long, short, short, short] * 200).last_half()
    assert sum(run.waited) / len(run.waited) < 5 * LATENCY


def test_nothing_is_held_with_one_step_in_flight_at_a_time() -> None:
    pacer = Pacer(1)
    for now in range(3):
        assert pacer.seconds_to_hold(now) == 0
        pacer.on_sent(64, now)
        assert pacer.seconds_to_hold(now + 0.1) == 0
        pacer.on_result(0.9, 0.1, now + 0.9)
    assert pacer.num_late == 0, "it was not held, so it is not late"


def test_another_executor_is_another_device() -> None:
    pacer = Pacer(2)
    simulate(pacer, [(64, 1.0, LATENCY)] * 20)
    pacer.start_over()
    pacer.on_sent(64, 100.0)
    assert pacer.seconds_to_hold(100.0) == 0
