"""Executors that join and leave while requests run: each that joins is used, and one that leaves loses no token."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.placement.integrity import check_integrity
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.pagewire.wire.discovery.fake_discovery import FakeDiscovery
from tests.services.scheduler.core.test_replicas import (
    assert_complete,
    executors,
    generate,
    output_of,
    prompt_of,
    submit,
    until,
)
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.service_line import ServiceLine


def line_of(directory: Path, num: int, *first: int, step_seconds: float = 0.005, **config: Any) -> ServiceLine:
    """Returns a line of `num` executors; `first` are the indices of those that are listed at first."""
    line = ServiceLine(directory, *executors(num, step_seconds=step_seconds), **config)
    line.discovery = FakeDiscovery(*(line.executor_addresses[index] for index in first))
    return line


def publish(line: ServiceLine, *indices: int) -> None:
    assert isinstance(line.discovery, FakeDiscovery)
    line.discovery.publish(*(line.executor_addresses[index] for index in indices))


def test_replicas_come_and_go_by_names_that_are_used_again() -> None:
    line = PureLine(FakeExecutor(), FakeExecutor())
    for number in range(4):
        line.add(prompt_of(number), max_tokens=20)
    for _ in range(2):
        for index in (0, 1):
            line.schedule(index)
    first, second = line.scheduler.replicas
    line.lose(0)
    line.scheduler.remove_replica(first)
    assert line.scheduler.replicas == (second,) and line.scheduler.num_waiting == 2
    third = line.scheduler.add_replica()
    assert (third.name, second.name) == ("executor-0", "executor-1")
    assert third.replica_id not in (first.replica_id, second.replica_id)
    (request, *_) = second.running
    line.scheduler.abort(request)
    assert request not in second.running
    check_integrity(line.scheduler)


async def test_an_executor_that_joins_takes_requests_that_wait(tmp_path: Path) -> None:
    line = line_of(tmp_path, 2, 0)
    line.executors[0] = FakeExecutorServicer(lambda: FakeExecutor(max_num_seqs=2), step_seconds=0.005)
    async with line.running():
        await line.wait_for_executors(1)
        call, collected = await submit(line, 8, 100)
        await line.wait_for_waiting(6)
        publish(line, 0, 1)
        await collected.read_until_finished(call, *range(1, 9))
        assert_complete(collected, 8, 100)
        assert len(line.executors[1].new_requests) == 6
        assert (await line.load()).num_executors == 2


async def test_requests_wait_for_the_first_executor_that_is_listed(tmp_path: Path) -> None:
    line = line_of(tmp_path, 1)
    async with line.running():
        call, collected = await submit(line, 3, 10)
        await line.wait_for_waiting(3)
        publish(line, 0)
        await collected.read_until_finished(call, 1, 2, 3)
        assert_complete(collected, 3, 10)


async def test_one_that_leaves_the_list_ends_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    line = line_of(tmp_path, 2, 0, 1)
    async with line.running():
        await line.wait_for_executors(2)
        call, collected = await submit(line, 4, 200)
        leaving, staying = line.executors
        await until(lambda: len(leaving.executor.rows) == len(staying.executor.rows) == 2)
        publish(line, 1)
        await until(lambda: line.engine.scheduler.replicas[0].is_leaving)
        more = [asyncio.create_task(generate(line, number)) for number in range(5, 9)]
        assert await asyncio.gather(*more) == [output_of(number, 10) for number in range(5, 9)]
        await collected.read_until_finished(call, *range(1, 5))
        assert_complete(collected, 4, 200)
        assert len(leaving.new_requests) == 2 and len(staying.new_requests) == 6, "each ended where it ran"
        await line.wait_for_executors(1)
        await until(lambda: len(line.engine.scheduler.replicas) == 1)
        assert not leaving.executor.rows
        services = line.engine.executors.drivers.values()
        assert [driver.address for driver in services] == [line.executor_addresses[1]]


async def test_one_that_is_listed_again_while_it_drains_stays(tmp_path: Path) -> None:
    line = line_of(tmp_path, 2, 0, 1)
    async with line.running():
        await line.wait_for_executors(2)
        call, collected = await submit(line, 4, 100)
        await until(lambda: len(line.executor.executor.rows) == 2)
        publish(line, 1)
        await until(lambda: line.engine.scheduler.replicas[0].is_leaving)
        publish(line, 0, 1)
        await until(lambda: not line.engine.scheduler.replicas[0].is_leaving)
        await collected.read_until_finished(call, *range(1, 5))
        assert_complete(collected, 4, 100)
        assert len(line.engine.scheduler.replicas) == 2


async def test_what_is_lost_with_one_that_left_goes_on_elsewhere_at_once(tmp_path: Path) -> None:
    line = line_of(tmp_path, 2, 0, 1)
    before = stats.PREFIX_QUERIES._value.get()
    async with line.running():
        await line.wait_for_executors(2)
        call, collected = await submit(line, 4, 200)
        await until(lambda: len(line.executor.executor.rows) == 2)
        publish(line, 1)
        await until(lambda: line.engine.scheduler.replicas[0].is_leaving)
        await line.kill_executor(0)
        await collected.read_until_finished(call, *range(1, 5))
        assert_complete(collected, 4, 200)
        assert len(line.engine.scheduler.replicas) == 1
        assert len(line.executors[1].new_requests) == 4
        assert stats.PREFIX_QUERIES._value.get() > before, "totals never fall"


async def test_the_only_one_works_until_it_is_idle_or_another_comes(tmp_path: Path) -> None:
    line = line_of(tmp_path, 2, 0)
    async with line.running():
        await line.wait_for_executors(1)
        call, collected = await submit(line, 2, 300)
        await until(lambda: len(line.executor.executor.rows) == 2)
        publish(line)
        await until(lambda: line.engine.scheduler.replicas[0].is_leaving)
        assert await generate(line, 3) == output_of(3, 10)
        publish(line, 1)
        await line.wait_for_executors(2)
        assert await generate(line, 4) == output_of(4, 10)
        assert len(line.executors[1].new_requests) == 1
        await collected.read_until_finished(call, 1, 2)
        assert_complete(collected, 2, 300)
        await line.wait_for_executors(1)


async def test_all_come_and_go_in_turn_without_notice(tmp_path: Path) -> None:
    line = line_of(tmp_path, 3, 0)
    async with line.running():
        await line.wait_for_executors(1)
        call, collected = await submit(line, 9, 120)
        reading = asyncio.create_task(collected.read_until_finished(call, *range(1, 10)))
        for indices in ((0, 1), (1,), (1, 2), (2,), (2, 0), (0,), (0, 1, 2)):
            await asyncio.sleep(0.06)
            publish(line, *indices)
        await reading
        assert_complete(collected, 9, 120)
        await line.wait_for_executors(3)
        await line.wait_until_free()


async def test_an_executor_with_two_addresses_is_used_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = line_of(tmp_path, 2, 0)
    async with line.running():
        await line.wait_for_executors(1)
        link = tmp_path / "alias.sock"
        link.symlink_to(tmp_path / "e0.sock")
        assert isinstance(line.discovery, FakeDiscovery)
        line.discovery.publish(f"unix:{link}", *line.executor_addresses)
        await line.wait_for_executors(2)
        await until(lambda: "it is already used at" in caplog.text)
        call, collected = await submit(line, 6, 100)
        await collected.read_until_finished(call, *range(1, 7))
        assert_complete(collected, 6, 100)
        assert [len(one.new_requests) for one in line.executors] == [3, 3]
        assert caplog.text.count("it is already used at") == 1, "logged once"
        line.discovery.publish(f"unix:{link}", line.executor_addresses[1])
        await until(lambda: len(line.engine.scheduler.replicas) == 2)
        await line.wait_for_executors(2)
        assert await generate(line, 7) == output_of(7, 10), "now by its other address"
