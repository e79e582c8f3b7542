"""Pacing, against a simulated device with the clock of the test."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.costs.cost_model import StepCosts
from pagewire.services.scheduler.costs.pacing import Pacer
from pagewire.services.scheduler.speculation.speculation import Speculation
from pagewire.services.scheduler.values.step import StepWork
from tests.fakes import FakeExecutor
from tests.services.scheduler.pure_line import PureLine

LATENCY = 0.002  # of a message, seconds


@dataclass
class Run:
    """The times of some steps on a device, one entry per step, seconds."""

    waited: list[float] = field(default_factory=list)  # from its decision until the device took it
    idle: list[float] = field(default_factory=list)  # of the device, before it
    wake_ups: list[int] = field(default_factory=list)  # of the scheduler, for timers, before its decision

    def last_half(self) -> "Run":
        half = len(self.waited) // 2
        return Run(self.waited[half:], self.idle[half:], self.wake_ups[half:])


def work_of(num_tokens: int) -> StepWork:
    """Decodes, or with many tokens one prompt."""
    work = StepWork() if num_tokens > 256 else StepWork(num_tokens)
    if num_tokens > 256:
        work.add_prompt(0, num_tokens)
    return work


def simulate(pacer: Pacer, steps: Iterable[tuple[int, float, float]]) -> Run:
    """A scheduler that always has a next step and learns what steps cost, and a device that executes them.

    steps: tokens; seconds on the device; seconds that a message takes, of the step as of its result. Timers have whole
    milliseconds, as uvloop's: they may be early.
    """
    run, costs, works = Run(), StepCosts(), deque[StepWork]()
    now = free_at = 0.0  # the scheduler's clock; when the device is done with all it has
    results: list[tuple[float, float, float | None]] = []  # of the steps in flight: when it is here, seconds, idle
    for num_tokens, seconds, latency in steps:
        num_wake_ups = 0
        while True:
            while results and (len(results) == 2 or results[0][0] <= now):
                time, execute_seconds, idle = results.pop(0)
                now = max(now, time)
                costs.learn(works.popleft(), pacer.seconds_of_oldest(now))
                pacer.on_result(execute_seconds, idle, now)
            hold = pacer.hold(now)
            if hold == 0:
                break
            assert results, "held back, but nothing runs"
            num_wake_ups += 1
            assert num_wake_ups < 100, "the processor spins"
            now = min(now + round(hold, 3), results[0][0])
        works.append(work_of(num_tokens))
        pacer.on_sent(costs.foreseen(works[-1]), now)
        start = max(now + latency, free_at)
        run.waited.append(start - now)
        run.idle.append(start - free_at)
        run.wake_ups.append(num_wake_ups)
        free_at = start + seconds
        results.append((free_at + latency, seconds, run.idle[-1] if len(run.idle) > 1 else None))
    return run


def num_late(idle: list[float]) -> int:
    return sum(seconds > 1e-6 for seconds in idle)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("seconds", [0.03, 0.1, 2.0])
def test_steady_steps_are_decided_shortly_before_they_run(seconds: float) -> None:
    run = simulate(Pacer(2), [(64, seconds, LATENCY)] * 400).last_half()
    assert mean(run.waited) < 3 * LATENCY
    assert mean(run.idle) < 0.2 * LATENCY
    assert max(run.wake_ups) <= 2


# Tokens, seconds, and how long its messages take.
ANY_STEP = st.tuples(st.integers(0, 2048), st.floats(1e-4, 3.0), st.floats(0, LATENCY))


@settings(deadline=None)
@given(st.lists(ANY_STEP, min_size=1, max_size=60))
def test_nothing_is_held_without_a_step_that_runs(steps: list[tuple[int, float, float]]) -> None:
    """Whatever was guessed, the device waits for two messages at most."""
    run = simulate(Pacer(2), steps)
    assert max(run.idle) <= 2 * LATENCY + 1e-9


def test_steps_that_cannot_be_foreseen_are_decided_early_at_last() -> None:
    """Sizes tell nothing: the lead grows until few steps are late."""
    run = simulate(Pacer(2), [(64, 0.03 if i % 2 else 0.09, LATENCY) for i in range(600)]).last_half()
    assert num_late(run.idle) < 0.2 * len(run.idle)


def test_short_steps_are_decided_at_once() -> None:
    run = simulate(Pacer(2), [(1, 0.012, LATENCY)] * 50).last_half()
    assert not any(run.wake_ups)
    assert num_late(run.idle) == 0


def test_short_steps_say_nothing_about_long_ones() -> None:
    """However many come between: as many of the held steps are late as if there were no others."""
    long, short = (2048, 0.08, LATENCY), (1, 0.012, LATENCY)
    run = simulate(Pacer(2), [long, *[short] * 20] * 200).last_half()
    held_idle = [idle for idle, wake_ups in zip(run.idle, run.wake_ups, strict=True) if wake_ups]
    assert len(held_idle) >= 90
    assert num_late(held_idle) < 0.25 * len(held_idle)


def test_sizes_have_guesses_of_their_own() -> None:
    long, short = (2048, 1.0, LATENCY), (32, 0.05, LATENCY)
    run = simulate(Pacer(2), [long, short, short, short] * 200).last_half()
    assert mean(run.waited) < 5 * LATENCY


def test_a_smaller_step_of_the_same_magnitude_takes_less() -> None:
    run = simulate(Pacer(2), [(127, 1.0, LATENCY), (64, 0.5, LATENCY)] * 300).last_half()
    assert num_late(run.idle) < 0.2 * len(run.idle)


def test_drafts_that_are_seldom_found_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps ask for seven, but few have some: after one that took long, the next is guessed to be a short one."""
    monkeypatch.setattr(Speculation, "expected", lambda self, step: 0.2)
    executor = FakeExecutor(num_blocks=1024, max_draft_tokens=7, draw_gain=lambda most: 1)
    line = PureLine(executor, check=False)
    line.add([1, 2, 3], max_tokens=400, ignore_eos=True)
    for found in [0] * 50 + [7, 0]:
        line.schedule()
        line.find_drafts(found)
        line.receive(seconds=0.1 if found else 0.05)
    step = line.schedule()
    assert step is not None and step.drafts_of == {0: 7}
    assert 0.04 < line.replica.expected_seconds(step) < 0.055


def test_nothing_is_held_with_one_step_in_flight_at_a_time() -> None:
    pacer = Pacer(1)
    for now in range(3):
        assert pacer.hold(now) == 0
        pacer.on_sent(0.9, now)
        assert pacer.hold(now + 0.1) == 0
        pacer.on_result(0.9, 0.1, now + 0.9)
    assert pacer.num_late == 0, "it was not held, so it is not late"


def test_another_executor_is_another_device() -> None:
    line = PureLine(FakeExecutor())
    line.add([1, 2, 3], max_tokens=200, ignore_eos=True)
    for _ in range(50):
        line.schedule()
        line.receive(seconds=1.0)
    pacer, replica = line.replica.pacer, line.replica
    pacer.on_sent(replica.expected_seconds(line.steps[-1]), 100.0)
    assert 0.9 < pacer.hold(100.0) < 1
    line.die()
    step = line.schedule()
    assert step is not None
    pacer.on_sent(replica.expected_seconds(step), 100.0)
    assert pacer.hold(100.0) == 0


def test_an_executor_that_tells_nothing_leaves_the_lead_alone() -> None:
    pacer = Pacer(2)
    lead = pacer.lead
    for now in range(200):
        pacer.hold(now)
        pacer.on_sent(1.0, now)
        if now > 0:
            pacer.on_result(1.0, None, now + 0.01)
    assert pacer.lead == lead


@pytest.mark.parametrize("seconds", [(0.1, 0.05), (0.05, 0.1)])
def test_steps_that_become_faster_or_slower_at_once_are_soon_foreseen(seconds: tuple[float, float]) -> None:
    before, after = seconds
    run = simulate(Pacer(2), [(64, before, LATENCY)] * 100 + [(64, after, LATENCY)] * 100)
    assert num_late(run.idle[100:]) <= 15
    assert mean(run.waited[-40:]) < 5 * LATENCY
