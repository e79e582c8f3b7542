"""Requests with a grammar on a fake executor, which compiles it first; other requests do not wait for that."""

import asyncio
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import scheduler_pb2
from pagewire.v1.common_pb2 import FinishReason, Grammar
from tests.fakes import FakeExecutor, FakeExecutorServicer, expected_output
from tests.services.scheduler.service.test_service import collect, make_line, output_of, prompt_of
from tests.services.scheduler.service_line import ServiceLine, generate_request

REFUSED, SLOW, FINE = Grammar(regex="refused"), Grammar(regex="slow"), Grammar(regex="fine")


def request_with(grammar: Grammar, number: int = 1) -> scheduler_pb2.SchedulerServiceGenerateRequest:
    return generate_request(prompt_of(number), max_tokens=12, grammar=grammar, external_id="mine")


async def tokens(line: ServiceLine, request: scheduler_pb2.SchedulerServiceGenerateRequest) -> list[int]:
    return [token_id for response in await collect(line, request) for token_id in response.token_ids]


async def test_the_executor_compiles_it_before_the_request_enters(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        assert await tokens(line, request_with(FINE)) == output_of(1, 12)
        assert line.executor.grammars == [FINE]
        assert line.executor.new_requests[0].sampling_params.grammar == FINE
        with pytest.raises(grpc.aio.AioRpcError, match="regex: refused") as error:
            await tokens(line, request_with(REFUSED))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len(line.executor.new_requests) == 1, "it has held no blocks"


async def test_others_do_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        slow = asyncio.create_task(tokens(line, request_with(SLOW, 2)))
        assert await tokens(line, request_with(FINE, 1)) == output_of(1, 12)
        assert await tokens(line, generate_request(prompt_of(3), max_tokens=12)) == output_of(3, 12)
        assert not slow.done()
        line.executor.released.set()
        assert await slow == output_of(2, 12)
        await line.wait_until_free()


async def test_a_request_ends_while_its_grammar_is_compiled(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        call = line.stub.Generate(request_with(SLOW))
        aborted = asyncio.create_task(collect(line, request_with(SLOW)))
        while len(line.executor.grammars) < 2:  # noqa: ASYNC110 - the executor's state
            await asyncio.sleep(0.01)
        call.cancel()
        await line.stub.Abort(scheduler_pb2.AbortRequest(external_ids=["mine"]))
        (response,) = await aborted
        assert response.finish_reason == FinishReason.FINISH_REASON_ABORT
        line.executor.released.set()
        assert await tokens(line, request_with(FINE, 4)) == output_of(4, 12)
        assert len(line.executor.new_requests) == 1
        await line.wait_until_free()


async def test_end_tokens_are_the_executors_to_allow(tmp_path: Path) -> None:
    """The executor samples an end token under ignore_eos or min_tokens only where the grammar ends."""
    output = expected_output(prompt_of(1), 12, vocab_size=1000)
    executor = FakeExecutorServicer(lambda: FakeExecutor(eos_token_ids=[output[4]]))
    async with ServiceLine(tmp_path, executor).running() as line:
        for params in ({"ignore_eos": True}, {"min_tokens": 10}):
            request = generate_request(prompt_of(1), max_tokens=12, grammar=FINE, **params)
            assert await tokens(line, request) == output[:5]


async def test_an_executor_that_is_away_is_waited_for(tmp_path: Path) -> None:
    async with make_line(tmp_path).running(with_executor=False) as line:
        waiting = asyncio.create_task(tokens(line, request_with(FINE)))
        await asyncio.sleep(0.05)
        await line.start_executor()
        assert await waiting == output_of(1, 12)
