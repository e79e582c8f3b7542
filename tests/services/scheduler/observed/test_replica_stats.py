"""The numbers of each replica for operators: metrics, load, status, the log line."""

import asyncio
import logging
from pathlib import Path

import pytest

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler import main
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.observed import log_line
from pagewire.services.scheduler.observed.log_line import LoadLine, log_load
from pagewire.services.scheduler.observed.replica_stats import REPLICAS
from pagewire.services.scheduler.service import tracking
from pagewire.telemetry import metrics
from pagewire.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from pagewire.wire import rpc
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.services.scheduler.core.test_replicas import assert_complete, executors, prompt_of, submit
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.service_line import ServiceLine


async def test_load_status_and_metrics_tell_replicas_apart(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, *executors(2)).running() as line:
        await line.wait_for_executors(2)
        call, collected = await submit(line, 6, 30)
        await collected.read_until_finished(call, *range(1, 7))
        assert_complete(collected, 6, 30)
        await line.wait_until_free()
        load = await line.load()
        assert [one.name for one in load.executors] == ["executor-0", "executor-1"]
        assert sum(one.num_blocks for one in load.executors) == load.num_blocks
        assert not any(one.num_running or one.is_leaving for one in load.executors)
        assert sum(one.num_free_blocks for one in load.executors) == load.num_free_blocks
        exposition = metrics.exposition()
        stub = admin_pb2_grpc.AdminServiceStub(line.channel)
        status = (await stub.GetStatus(admin_pb2.GetStatusRequest())).services[0].scheduler
    for one in status.replicas:
        generated = f'pagewire:executor_generation_tokens_total{{executor="{one.name}"}} {one.num_generation_tokens}.0'
        assert generated in exposition
        assert f'pagewire:executor_prefix_cache_queries_total{{executor="{one.name}"}} 60.0' in exposition
    assert sum(one.num_generation_tokens for one in status.replicas) == 180
    assert [one.num_prefix_queries for one in status.replicas] == [60, 60]


def test_one_that_is_gone_has_no_metrics() -> None:
    line = PureLine(FakeExecutor(), FakeExecutor())
    REPLICAS.scheduler = line.scheduler
    assert 'executor_requests_running{executor="executor-1"}' in telemetry_of_replicas()
    line.leave(1)
    assert 'executor="executor-1"' not in telemetry_of_replicas()
    line.join(FakeExecutor())
    assert 'executor_requests_running{executor="executor-1"}' in telemetry_of_replicas()


def telemetry_of_replicas() -> str:
    return "\n".join(
        f'{sample.name.removeprefix("pagewire:")}{{executor="{sample.labels["executor"]}"}}'
        for metric in REPLICAS.collect()
        for sample in metric.samples
    )


def test_the_line_of_the_log_says_what_has_happened_since_the_last() -> None:
    line = PureLine(FakeExecutor(max_num_seqs=2), FakeExecutor(max_num_seqs=2))
    log = LoadLine(line.scheduler)
    assert log.text(10) == "", "nothing yet"
    for number in range(6):
        line.add(prompt_of(number), max_tokens=20)
    for index in (0, 1):
        line.schedule(index)
        line.receive(index)
    one = "2 running, 0.2 tokens/s, KV cache 2%, prefix hits 0%"
    assert log.text(10) == f"executor-0: {one}; executor-1: {one}; 2 waiting"
    line.run()
    text = log.text(10)
    assert "executor-0: 0 running" in text and text.endswith("0 waiting")
    assert log.text(10) == "", "all is said"


def test_of_many_replicas_the_line_has_sums() -> None:
    line = PureLine(*(FakeExecutor() for _ in range(12)))
    for number in range(15):
        line.add(prompt_of(number), max_tokens=20)
    for index in range(12):
        line.schedule(index)
    text = LoadLine(line.scheduler).text(10)
    assert text == (
        "12 executors: 15 running (1 to 2 on each), 0.0 tokens/s, KV cache 1% to 2%, prefix hits 0%; 0 waiting"
    )


def test_the_line_has_the_preemptions_so_far() -> None:
    line = PureLine(FakeExecutor(num_blocks=12, block_size=4, max_num_seqs=4))
    log = LoadLine(line.scheduler)
    for number in range(4):
        line.add(prompt_of(number, 8), max_tokens=30)
    line.run()
    count = line.replica.counts.num_preemptions
    assert count and f", {count} preemptions ({count} new); 0 waiting" in log.text(10)
    line.add(prompt_of(9, 8), max_tokens=2)
    line.run()
    assert f", {count} preemptions; 0 waiting" in log.text(10)


async def test_preemptions_are_logged_with_their_count_and_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is logged at once, later ones once in a while."""
    executor = FakeExecutorServicer(lambda: FakeExecutor(num_blocks=12, block_size=4, max_num_seqs=4))
    for seconds, is_each_logged in ((0.0, True), (1000.0, False)):
        monkeypatch.setattr(tracking, "_PREEMPTION_LOG_S", seconds)
        caplog.clear()
        async with ServiceLine(tmp_path, executor).running() as line:
            await line.wait_for_executors(1)
            call, collected = await submit(line, 4, 25)
            await collected.read_until_finished(call, *range(1, 5))
            num = line.engine.scheduler.replicas[0].counts.num_preemptions
        logged = [one.getMessage() for one in caplog.records if "was preempted" in one.getMessage()]
        assert num > 1 and logged[0].endswith("total_cumulative_preemption_cnt=1"), logged
        assert "--kv-cache-memory-bytes" in logged[0] and "executor-0" in logged[0]
        assert (logged[-1].endswith(f"={num}")) == is_each_logged and (len(logged) > 1) == is_each_logged


@pytest.mark.parametrize("is_disabled", [False, True])
async def test_the_line_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disabled: bool) -> None:
    begun, ends = asyncio.Event(), asyncio.Event()

    async def signalled() -> bool:
        await ends.wait()
        return False

    async def log_load(_: Scheduler) -> None:
        begun.set()
        await ends.wait()

    monkeypatch.setattr(rpc, "wait_for_signal", signalled)
    monkeypatch.setattr(log_line, "log_load", log_load)
    address = f"unix:{tmp_path}/s.sock"
    config = SchedulerConfig(listen=address, executor_address="unix:/none", disable_log_stats=is_disabled)
    serving = asyncio.create_task(main.serve(config))
    async with rpc.channel(address) as channel:
        await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoad(
            scheduler_pb2.GetLoadRequest(), wait_for_ready=True, timeout=10
        )
    assert begun.is_set() != is_disabled
    ends.set()
    await serving


async def test_the_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    line = PureLine(FakeExecutor())
    line.add(prompt_of(1), max_tokens=20)
    line.schedule()
    with caplog.at_level(logging.INFO):
        logging_task = asyncio.create_task(log_load(line.scheduler, 0.01))
        async with asyncio.timeout(10):
            while "executor-0: 1 running" not in caplog.text:  # noqa: ASYNC110 - a log
                await asyncio.sleep(0.01)
        logging_task.cancel()
