"""Admission through the real service: refusals say when to come back, and those let in go on."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire import error_details
from pagewire.services.scheduler.request_output import new_outbox
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
        live = [line.stub.Generate(generate_request([i, 3], max_tokens=50)) for i in range(2)]
        await asyncio.gather(*(call.read() for call in live))
        waiting = token_submission(1, [5, 6], max_tokens=50)
        waiting.resubmitted = True
        line.engine.submit(waiting, outbox, 1)
        refused = token_submission(2, [7, 8], max_tokens=50)
        with pytest.raises(Exception, match="would wait about"):
            line.engine.submit(refused, outbox, 2)
        refused.resubmitted = True
        line.engine.submit(refused, outbox, 2)


async def _read(call: grpc.aio.UnaryStreamCall) -> list[int]:
    return [token_id async for response in call for token_id in response.token_ids]
