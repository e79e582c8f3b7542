"""The measured costs of steps."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.parallel.group import ALONE_GROUP
from pagewire.services.executor.runner.executor_info import DecodeCosts
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.start.decode_costs import measure
from pagewire.services.executor.step.limits import Limits


class TimedRunner:
    """A runner with steps that take a second, a tenth for each token, and half a second for each draft."""

    limits = Limits(16, 256, 512, 16)
    max_draft_tokens = 4

    def __init__(self, scale: float, per_draft: float = 0.5) -> None:
        self.now, self.scale, self.per_draft = 0.0, scale, per_draft
        self.sizes = [1, 2, 1 + self.max_draft_tokens]  # of the warm-up
        self.proposer = Proposer()

    def uniform_run(self, shape: BatchShape) -> None:
        drafts = shape.max_query_len - 1
        is_first = shape.num_tokens not in self.sizes
        self.sizes.append(shape.num_tokens)
        self.now += self.scale * (1 + 0.1 * shape.num_tokens + self.per_draft * drafts + 5 * is_first)


def rounds(costs: DecodeCosts) -> dict[int, float]:
    (method,) = costs.methods
    return dict(method.rounds)


def test_sizes_are_measured_once_they_are_warm() -> None:
    runner = TimedRunner(0.001)
    costs = measure(runner, ALONE_GROUP, lambda: runner.now, lambda: runner.now)  # type: ignore[arg-type]
    assert [size for size, _ in costs.steps] == [1, 2, 4, 8, 16]
    assert runner.now < 0.25, "a start takes hardly longer"
    assert [seconds for _, seconds in costs.steps] == pytest.approx(
        [0.001 + 0.0001 * size for size, _ in costs.steps], rel=1e-6
    )
    assert rounds(costs) == pytest.approx({1: 0.0005, 8: 0.0005}, rel=1e-6)


def test_a_slow_model_is_measured_at_few_sizes() -> None:
    runner = TimedRunner(1.0)
    costs = measure(runner, ALONE_GROUP, lambda: runner.now, lambda: runner.now)  # type: ignore[arg-type]
    assert [size for size, _ in costs.steps] == [1, 2]
    assert rounds(costs) == pytest.approx({1: 0.5}, rel=0.1)
    assert runner.sizes[3:] == [5, 1, 2], "each once"


def test_the_fastest_of_some_times_counts() -> None:
    """Something else runs on the machine at first."""
    runner = TimedRunner(0.001)

    def uniform_run(shape: BatchShape) -> None:
        runner.scale = 0.003 if len(runner.sizes) < 11 else 0.001
        TimedRunner.uniform_run(runner, shape)

    runner.uniform_run = uniform_run  # type: ignore[method-assign]
    costs = measure(runner, ALONE_GROUP, lambda: runner.now, lambda: runner.now)  # type: ignore[arg-type]
    assert dict(costs.steps)[1] == pytest.approx(0.0011, rel=1e-6)
    assert rounds(costs) == pytest.approx({1: 0.0005, 8: 0.0005}, rel=1e-6)


class Pair:
    """Two ranks that compare numbers."""

    def __init__(self) -> None:
        self._barrier, self._given = Barrier(2), list[int]()

    def least(self, number: int) -> int:
        self._given.append(number)
        self._barrier.wait(timeout=10)
        least = min(self._given)
        if self._barrier.wait(timeout=10) == 0:
            self._given.clear()
        self._barrier.wait(timeout=10)
        return least


def test_ranks_take_the_same_steps_whatever_each_has_measured() -> None:
    others, pair = (TimedRunner(0.001, per_draft=0.0), TimedRunner(0.03)), Pair()

    def sizes(runner: TimedRunner) -> list[int]:
        measure(runner, pair, lambda: runner.now, lambda: runner.now)  # type: ignore[arg-type]
        return runner.sizes[3:]

    with ThreadPoolExecutor(2) as threads:
        for other in others:
            first, second = threads.map(sizes, (TimedRunner(0.001), other))
            assert first == second
