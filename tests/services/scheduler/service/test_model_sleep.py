"""The model sleeps and wakes: what becomes of requests, and of a line with parts that die meanwhile."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.services.scheduler.sleep import model_sleep
from pagewire.telemetry import metrics
from pagewire.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from pagewire.v1.admin_pb2 import SleepMode
from pagewire.v1.executor_pb2 import SleepDecision, SleepState
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest
from tests.fakes import FakeExecutor, FakeExecutorServicer, expected_output
from tests.services.scheduler.service_line import Collected, ServiceLine, token_submission

VOCAB_SIZE = 1000
ABORT, ERROR, LENGTH = (
    common_pb2.FINISH_REASON_ABORT,
    common_pb2.FINISH_REASON_ERROR,
    common_pb2.FINISH_REASON_LENGTH,
)


def executor(*, step_seconds: float = 0.002, **options: Any) -> FakeExecutorServicer:
    return FakeExecutorServicer(FakeExecutor, step_seconds=step_seconds, **options)


def prompt_of(number: int) -> list[int]:
    return [(number * 101 + i) % VOCAB_SIZE for i in range(20)]


class Clock:
    """The time of the process, of which some has been skipped."""

    passed = 0.0  # seconds
    time_ns = staticmethod(time.time_ns)

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


class Clients:
    """Requests on one stream, and their outputs."""

    def __init__(self, line: ServiceLine) -> None:
        self.call = line.link.Connect()
        self.collected = Collected()

    async def submit(self, *numbers: int, max_tokens: int = 30) -> None:
        requests = [token_submission(one, prompt_of(one), max_tokens=max_tokens) for one in numbers]
        await self.call.write(SchedulerLinkServiceConnectRequest(requests=requests))

    async def until(self, is_so: Callable[[Collected], object]) -> None:
        async with asyncio.timeout(10):
            while not is_so(self.collected):
                self.collected.add(await self.call.read())

    async def end(self, *numbers: int, max_tokens: int = 30) -> None:
        """Waits for the ends, and checks that nothing is lost or repeated."""
        await self.collected.read_until_finished(self.call, *numbers)
        for one in numbers:
            assert self.collected.token_ids[one] == expected_output(prompt_of(one), max_tokens, vocab_size=VOCAB_SIZE)
            assert self.collected.finish_reasons[one] == [LENGTH]


def admin(line: ServiceLine) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(line.channel)


async def sleep(line: ServiceLine, level: int = 1, mode: Any = SleepMode.SLEEP_MODE_WAIT) -> int:
    async with asyncio.timeout(10):
        return (await admin(line).SleepModel(admin_pb2.SleepModelRequest(level=level, mode=mode))).num_executors


async def wake(line: ServiceLine) -> int:
    async with asyncio.timeout(10):
        return (await admin(line).WakeModel(admin_pb2.WakeModelRequest())).num_executors


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.005)


def level_of(line: ServiceLine) -> int:
    return line.engine.sleep.status.level


async def test_running_requests_end_and_others_wait_until_the_wake(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor(), executor()).running() as line:
        await line.wait_for_executors(2)
        clients = Clients(line)
        await clients.submit(1, 2, max_tokens=60)
        await clients.until(lambda found: len(found.token_ids) == 2)
        sleeping = asyncio.create_task(sleep(line, 2))
        await until(lambda: any(replica.is_draining for replica in line.engine.scheduler.replicas))
        await clients.submit(3)
        await clients.end(1, 2, max_tokens=60)
        assert await sleeping == 2
        assert [one.sleep for one in line.executors] == [SleepState(level=2)] * 2
        for call in (
            admin(line).ReplaceWeights(admin_pb2.ReplaceWeightsRequest(model="/w")),
            admin(line).LoadAdapter(admin_pb2.AdminServiceLoadAdapterRequest(name="a", path="/a")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="the model sleeps; wake it first"):
                await call
        assert (await line.load()).num_waiting == 1 and 3 not in clients.collected.token_ids
        exposed = metrics.exposition()
        assert 'pagewire:executor_sleep_state{executor="executor-1",sleep_state="discard_all"} 1.0' in exposed
        assert await sleep(line, 1) == 2, "a repetition changes nothing"
        assert await wake(line) == 2
        await clients.end(3)
        assert [hello.sleep_level for hello in clients.collected.hellos[:3]] == [0, 2, 0]
        await line.wait_until_free()


async def test_requests_are_kept_with_their_tokens_or_end_with_them(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor(), recovery_timeout=0.3).running() as line:
        clients = Clients(line)
        await clients.submit(1, 2, max_tokens=200)
        await clients.until(lambda found: len(found.token_ids) == 2)
        assert await sleep(line, mode=SleepMode.SLEEP_MODE_KEEP) == 1
        await line.wait_for_waiting(2)
        assert not line.engine.availability.is_waiting, "recovery_timeout is for executors that are lost"
        await wake(line)
        await clients.end(1, 2, max_tokens=200)
        await clients.submit(3, max_tokens=1000)
        await clients.until(lambda found: 3 in found.token_ids)
        await sleep(line, mode=SleepMode.SLEEP_MODE_ABORT)
        await clients.until(lambda found: 3 in found.finish_reasons)
        tokens = clients.collected.token_ids[3]
        assert clients.collected.finish_reasons[3] == [ABORT]
        assert tokens == expected_output(prompt_of(3), len(tokens), vocab_size=VOCAB_SIZE)


async def test_a_wake_during_the_wait_for_requests_keeps_the_model_awake(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        clients = Clients(line)
        await clients.submit(1, max_tokens=300)
        await clients.until(lambda found: found.token_ids)
        sleeping = asyncio.create_task(sleep(line))
        await until(lambda: line.engine.scheduler.replicas[0].is_draining)
        await clients.submit(2)
        assert await wake(line) == 1
        with pytest.raises(grpc.aio.AioRpcError, match="the model was woken"):
            await sleeping
        await clients.end(1, max_tokens=300)
        await clients.end(2)
        assert line.executor.sleeps == []


@pytest.mark.parametrize("while_sleeping", [True, False])
async def test_an_executor_that_dies_is_as_its_predecessor_was_to_be(while_sleeping: bool, tmp_path: Path) -> None:
    """The executor dies asleep, or in the middle of falling asleep."""
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        if while_sleeping:
            await sleep(line)
            await line.kill_executor()
            await line.start_executor(executor())
        else:
            line.executor.may_sleep.clear()
            sleeping = asyncio.create_task(sleep(line))
            await until(lambda: line.executor.sleeps)
            await line.kill_executor()
            await line.start_executor(executor())
            assert await sleeping == 1
        await until(lambda: line.executor.sleep.level == 1)
        clients = Clients(line)
        await clients.submit(1)
        await line.wait_for_waiting(1)
        assert not line.executor.num_streams
        line.executor.may_wake.clear()
        waking = asyncio.create_task(wake(line))
        await until(lambda: line.executor.sleeps == [1, 0])
        await line.kill_executor()  # in the middle of waking
        await line.start_executor(executor())
        await clients.end(1)
        assert await waking == 1


@pytest.mark.parametrize("wakes", [True, False])
async def test_a_scheduler_that_restarts_learns_that_the_model_sleeps(wakes: bool, tmp_path: Path) -> None:
    asleep = executor()
    asleep.sleep = SleepState(level=2, wakes_on_request=wakes)
    async with ServiceLine(tmp_path, asleep, recovery_timeout=0.3).running() as line:
        clients = Clients(line)
        await clients.submit(1)  # as tokenizer services resubmit theirs
        if not wakes:
            await line.wait_for_waiting(1)
            await until(lambda: level_of(line) == 2)
            assert line.engine.availability.info is not None, "clients learn the model"
            await until(lambda: not line.engine.availability.is_waiting)
            assert not asleep.num_streams
            await wake(line)
        await clients.end(1)
        assert level_of(line) == 0


async def test_requests_wait_as_long_as_a_wake_takes(tmp_path: Path) -> None:
    """Begins the wait for an executor only when one that wakes is lost."""
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        await sleep(line)
        clients = Clients(line)
        await clients.submit(1)
        await line.wait_for_waiting(1)
        line.executor.may_wake.clear()
        waking = asyncio.create_task(wake(line))
        await until(lambda: line.executor.sleeps == [1, 0])
        assert not line.engine.availability.is_waiting
        await line.kill_executor()
        await until(lambda: line.engine.availability.is_waiting)
        await line.start_executor(executor())
        await clients.end(1)
        assert await waking == 1


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("is_asleep", [True, False])
async def test_the_latest_decision_counts_whichever_executor_is_described_first(
    first: int, is_asleep: bool, tmp_path: Path
) -> None:
    """Starts a scheduler beside an executor that missed the last decision, or has just started."""
    asleep, awake = executor(), executor()
    asleep.sleep = SleepState(level=2)
    asleep.sleep_decision = SleepDecision(state=asleep.sleep, decided_at=5)
    awake.sleep_decision = None if is_asleep else SleepDecision(decided_at=7)
    async with ServiceLine(tmp_path, asleep, awake).running(with_executor=False) as line:
        await line.start_executor(index=first)
        await until(lambda: line.engine.availability.info is not None)
        await line.start_executor(index=1 - first)
        if is_asleep:
            await until(lambda: awake.sleep.level == 2)
        else:
            await line.wait_for_executors(2)
            assert not asleep.sleep.level
        assert level_of(line) == (2 if is_asleep else 0)


async def test_a_model_that_cannot_be_woken_ends_its_requests_once_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(model_sleep, "time", clock)
    broken = executor()
    broken.sleep = SleepState(level=1, wakes_on_request=True)
    broken.wake_problem = "no such file"
    async with ServiceLine(tmp_path, broken).running() as line:
        await until(lambda: level_of(line) == 1)
        clients = Clients(line)
        for number in (1, 2):  # the second one within the back-off
            await clients.submit(number)
            await clients.collected.read_until_finished(clients.call, number)
            assert clients.collected.finish_reasons[number] == [ERROR]
            assert "the model cannot be woken: no such file" in clients.collected.errors[number].message
        assert broken.sleeps == [0], "it was tried once"
        assert "no such file" in line.engine.sleep.status.problem
        with pytest.raises(grpc.aio.AioRpcError, match="no such file"):
            await wake(line)
        broken.wake_problem = ""
        clock.passed += 3 * model_sleep.FIRST_BACKOFF_S
        await clients.submit(3)
        await clients.end(3)
        assert not line.engine.sleep.status.problem


async def test_a_model_without_requests_falls_asleep_until_the_next_one(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor(), idle_timeout=0.2).running() as line:
        clients = Clients(line)
        for number in (1, 2):
            await clients.submit(number)
            await clients.end(number)
            await until(lambda: line.executor.sleep == SleepState(level=1, wakes_on_request=True))
        await sleep(line, 2)
        await clients.submit(3)
        await line.wait_for_waiting(1)
        assert level_of(line) == 2, "an operator put it to sleep"
        await wake(line)
        await clients.end(3)


async def test_what_cannot_sleep_is_refused(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        with pytest.raises(grpc.aio.AioRpcError, match="level is 3; it must be 1 or 2"):
            await sleep(line, 3)
        assert await wake(line) == 1, "it is awake"
        assert level_of(line) == 0
