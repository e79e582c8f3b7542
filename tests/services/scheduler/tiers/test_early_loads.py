"""Loads from other executors, and loads for requests that do not wait for a replica yet."""

import pytest

from pagewire.services.scheduler.tiers.replica_tiers import ReplicaTiers
from pagewire.services.scheduler.tiers.source import Source
from tests.fakes import FakeExecutor, FakeTier
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.tiers.test_loads import add, assert_right


def pair() -> tuple[PureLine, ReplicaTiers]:
    """Returns a line of an executor that computes prompts and one that loads from it, and the tiers of the latter."""
    line = PureLine(*(FakeExecutor(block_size=4, tier=FakeTier(), max_num_batched_tokens=16) for _ in range(2)))
    first, second = line.tiers.of_replica[0], line.tiers.of_replica[1]
    second.others = lambda: [Source("executor-0", first.contents)]
    return line, second


def test_blocks_are_loaded_while_others_are_computed_elsewhere() -> None:
    line, tiers = pair()
    request = add(line, max_tokens=6)
    holding = tiers.hold(request)
    for num_blocks in (4, 8, 10):
        line.schedule(0)
        line.receive(0)
        assert holding.extend(num_blocks) and not holding.loads[-1].is_over
        step = line.schedule(1)
        assert step is not None and step.tiers is not None
        (load,) = step.tiers.loads
        assert load.source == "executor-0" and len(load.blocks[0].ids) == min(4, num_blocks - (num_blocks - 1) // 4 * 4)
        line.receive(1)
    assert not holding.extend(10)
    for _ in range(3):
        line.end_load(1)
    assert all(load.is_over for load in holding.loads)
    assert line.scheduler.replicas[1].kv.num_free_blocks == 246, "they are held"
    line.replica._rows.preempt(request, line.scheduler._waiting)
    line.fleet.note(line.replica)
    before = line.executors[1].num_executed_tokens
    while not request.is_finished:
        line.schedule(1)
        line.receive(1)
    assert_right(line, request)
    assert line.executors[1].num_executed_tokens - before <= 6 + 2
    line.schedule(0)
    line.schedule(1)
    assert line.scheduler.replicas[1].kv.num_free_blocks == 256


def test_a_waiting_request_loads_from_a_source() -> None:
    line, _ = pair()
    first = add(line, max_tokens=1)
    while not first.is_finished:
        line.schedule(0)
        line.receive(0)
    request = add(line, max_tokens=2)
    line.replica.drain()
    step = line.schedule(1)
    assert step is not None and step.tiers is not None and step.tiers.loads[0].source == "executor-0"
    line.receive(1)
    line.end_load(1)
    line.schedule(1)
    assert request.num_cached_tokens == 40


@pytest.mark.parametrize("is_loading", [True, False])
def test_early_loads_are_released_once(is_loading: bool) -> None:
    line, tiers = pair()
    request = add(line, max_tokens=30)
    line.schedule(0)
    line.receive(0)
    holding = tiers.hold(request)
    assert holding.extend(4)
    line.schedule(1)
    if not is_loading:
        line.end_load(1)
    line.abort(request)
    holding.release()
    holding.release()
    if is_loading:
        line.end_load(1)
    line.run()
    assert line.scheduler.replicas[1].kv.num_free_blocks == 256
    assert not holding.extend(4)
