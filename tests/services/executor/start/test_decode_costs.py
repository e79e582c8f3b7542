"""The measured costs of steps."""

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

    def __init__(self, scale: float) -> None:
        self.now, self.scale = 0.0, scale
        self.sizes = [1, 2, 1 + self.max_draft_tokens]  # of the warm-up
        self.proposer = Proposer()

    def uniform_run(self, shape: BatchShape) -> None:
        drafts = shape.max_query_len - 1
        is_first = shape.num_tokens not in self.sizes
        self.sizes.append(shape.num_tokens)
        self.now += self.scale * (1 + 0.1 * shape.num_tokens + 0.5 * drafts + 5 * is_first)


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
