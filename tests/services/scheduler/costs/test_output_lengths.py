"""The estimate of the length of outputs, alone and as the scheduler learns it."""

import random

import pytest

from pagewire.services.scheduler.costs.output_lengths import OutputLengths
from tests.fakes import FakeExecutor
from tests.services.scheduler.pure_line import PureLine


def learned(lengths: list[int]) -> OutputLengths:
    """Requests that run one after another."""
    outputs = OutputLengths()
    for length in lengths:
        outputs.learn(length, 0)
        outputs.learn(0, 1)
    return outputs


def test_lengths_are_unknown_until_eight_requests_have_ended() -> None:
    assert learned([10] * 7).mean(otherwise=99.0) == 99.0
    assert learned([10] * 8).mean(otherwise=99.0) == pytest.approx(10, rel=0.05)


def test_the_mean_is_found() -> None:
    draw = random.Random(1)
    assert learned([draw.randrange(1, 101) for _ in range(1000)]).mean(0.0) == pytest.approx(50, rel=0.2)


def test_later_requests_count_more() -> None:
    assert learned([10] * 500 + [200] * 200).mean(0.0) == pytest.approx(200, rel=0.05)


def test_tokens_of_running_requests_count() -> None:
    outputs = learned([10] * 100)
    outputs.learn(10_000, 0)
    assert outputs.mean(0.0) > 100


def test_the_scheduler_learns_from_ends_and_from_aborts_of_requests_that_ran() -> None:
    line = PureLine(FakeExecutor(max_num_seqs=1))
    lengths = line.scheduler.output_lengths
    for _ in range(7):
        line.add([1, 2, 3], max_tokens=5, ignore_eos=True)
    line.run()
    runs, waits = (line.add([1, 2, 3], max_tokens=50, ignore_eos=True) for _ in range(2))
    line.schedule()
    line.scheduler.abort(waits)
    assert lengths.mean(otherwise=0.0) == 0.0
    line.receive()
    line.scheduler.abort(runs)
    assert 4 < lengths.mean(otherwise=0.0) < 6
