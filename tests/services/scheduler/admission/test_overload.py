"""Admission through the real service: refusals say when to come back, and those let in go on."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.scheduler.admission.entrance import Entrance
from pagewire.services.scheduler.placement.integrity import check_integrity
from pagewire.services.scheduler.service.deadlines import Deadlines
from pagewire.services.scheduler.service.request_output import RequestOutbox, new_outbox
from pagewire.wire import rpc
from pagewire.wire.status import error_details
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.services.scheduler.service_line import ServiceLine, generate_request, token_submission


def make_line(tmp_path: Path, **config: Any) -> ServiceLine:
    executor = FakeExecutorServicer(lambda: FakeExecutor(max_num_seqs=2), step_seconds=0.005)
    return ServiceLine(tmp_path, executor, **config)


async def learn(line: ServiceLine) -> None:
    """Lets the service see enough requests to know its speed: 10 of 8 steps in 2 rows."""
    calls = [line.stub.Generate(generate_request([i, 1, 2], max_tokens=8)) for i in range(10)]
    for call in calls:
        assert [one async for one in call]


async def test_a_refusal_says_when_to_come_back_and_is_right(tmp_path: Path) -> None:
    async with make_line(tmp_path, max_queue_time=0.1).running() as line:
        await learn(line)
        calls = [line.stub.Generate(generate_request([i, 3], max_tokens=8)) for i in range(40)]
        answers = await asyncio.gather(*(_read(call) for call in calls), return_exceptions=True)
        refusals = [one for one in answers if isinstance(one, grpc.aio.AioRpcError)]
        assert 0 < len(refusals) < 40
        for refusal in refusals:
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "--max-queue-time is 0.1 s" in (refusal.details() or "")
        delays = [error_details.retry_delay_of(refusal) or 0 for refusal in refusals]
        assert 0 < min(delays) < max(delays) < 10
        await asyncio.sleep(min(delays))
        assert len(await _read(line.stub.Generate(generate_request([99, 3], max_tokens=8)))) == 8


async def test_a_resubmitted_request_is_let_in(tmp_path: Path) -> None:
    async with make_line(tmp_path, max_queue_time=0.001).running() as line:
        await learn(line)
        outbox = new_outbox()
        for number in range(3):  # two have rows, and one waits
            resubmitted = token_submission(number, [number, 6], max_tokens=500)
            resubmitted.resubmitted = True
            line.engine.submit(resubmitted, outbox, number)
        refused = token_submission(3, [7, 8], max_tokens=500)
        with pytest.raises(rpc.RpcError, match="would wait about"):
            line.engine.submit(refused, outbox, 3)
        refused.resubmitted = True
        line.engine.submit(refused, outbox, 3)


async def test_a_failure_is_no_reason_to_forecast_longer_waits(tmp_path: Path) -> None:
    """Otherwise an idle line would refuse the next request."""
    async with make_line(tmp_path).running() as line:
        await learn(line)
        calls = [line.stub.Generate(generate_request([i, 3], max_tokens=8)) for i in range(12)]
        await calls[0].read()
        await line.kill_executor()
        await asyncio.sleep(1.0)
        await line.start_executor()
        for call in calls[1:]:
            assert [one async for one in call]
        running = [line.stub.Generate(generate_request([i, 5], max_tokens=500)) for i in range(2)]
        await asyncio.gather(*(call.read() for call in running))
        submission = token_submission(1, [5, 6], max_tokens=8)
        line.engine.submit(submission, new_outbox(), 1)
        (waiting,) = (one for one in line.engine._delivery.live.values() if one.first_step_time is None)
        admission = line.engine._admission
        assert isinstance(admission, Entrance)
        forecast = admission.forecast_of(waiting.request)
        assert 0 < forecast.wait < 2 * forecast.plain_wait


@pytest.mark.parametrize("rows_taken", [0, 2])
async def test_pages_are_free_when_the_time_is_up(tmp_path: Path, rows_taken: int) -> None:
    """Checks a request that runs, and one that waits; with the next step nothing of it is scheduled."""
    async with make_line(tmp_path).running() as line:
        others = [line.stub.Generate(generate_request([i, 3], max_tokens=2000)) for i in range(rows_taken)]
        await asyncio.gather(*(call.read() for call in others))
        num_entered = len(line.executor.new_requests)
        outbox = new_outbox()
        submission = token_submission(1, [5, 6], max_tokens=2000)
        # Enough for a first step on a busy machine, and too little for 2,000.
        submission.context.timeout.FromMilliseconds(60 if rows_taken else 500)
        line.engine.submit(submission, outbox, 1)
        async with asyncio.timeout(5):
            error = await _error_of(outbox)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert ("waited for its first step" if rows_taken else "output was generated") in error.message
        assert line.engine.scheduler.num_waiting == 0
        assert line.engine.scheduler.num_running == rows_taken, "free at once, not with the next step"
        check_integrity(line.engine.scheduler)
        for call in others:
            call.cancel()
        await line.wait_until_free()
        assert len(line.executor.new_requests) - num_entered == (0 if rows_taken else 1)


async def test_what_comes_too_late_is_not_taken(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        submission = token_submission(1, [5, 6])
        submission.context.timeout.FromMilliseconds(0)
        with pytest.raises(rpc.RpcError, match="the deadline of the request passed") as error:
            line.engine.submit(submission, new_outbox(), 1)
        assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_that_is_cancelled_or_late_frees_its_pages(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        cancelled = line.stub.Generate(generate_request([1, 2], max_tokens=2000))
        await cancelled.read()
        late = line.stub.Generate(generate_request([3, 4], max_tokens=2000), timeout=0.1)
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await _read(late)
        cancelled.cancel()
        await line.wait_until_free()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 100), st.booleans()), max_size=200))
def test_deadlines_are_reported_in_order_and_once(requests: list[tuple[int, int, bool]]) -> None:
    deadlines, told, expected = Deadlines(), [], {}
    for number, (time, _, is_removed) in enumerate(requests):
        deadlines.add(number, time)
        if is_removed:
            deadlines.remove(number)
        else:
            expected[number] = time
    for now in range(31):
        due = deadlines.take_due(now)
        assert all(expected[number] == now for number in due)
        told += due
    assert sorted(told) == sorted(expected)
    assert deadlines.next is None


async def _error_of(outbox: RequestOutbox) -> rpc.RpcError:
    async for outputs in outbox:
        for output in outputs.values():
            if output.error is not None:
                return output.error
    raise AssertionError("there was none")


async def _read(call: grpc.aio.UnaryStreamCall) -> list[int]:
    return [token_id async for response in call for token_id in response.token_ids]
