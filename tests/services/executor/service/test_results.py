"""Results on their way to the scheduler: in order, whole, whatever their size, and from whichever thread."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.services.executor.service.session import Results
from pagewire.v1 import executor_pb2_grpc
from pagewire.v1.executor_pb2 import StepResult
from pagewire.wire import rpc
from pagewire.wire.local.pipe import ThreadWriter, thread_writer

SIZES = [random.Random(0).choice([1, 10, 1_000, 8_000, 100_000]) for _ in range(300)]


class _Writers(executor_pb2_grpc.ExecutorServiceServicer):
    """Answers with results of so many token ids from a thread, as a worker does, then ends."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self._sizes = sizes
        self.writer: ThreadWriter | None = None
        self.num_in_loop = 0  # results that the event loop has written
        self.has_ended = asyncio.Event()

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[StepResult]:
        self.writer = thread_writer(context)
        context.add_done_callback(lambda _: self.has_ended.set())
        results = Results(asyncio.get_running_loop(), self.writer)
        thread = threading.Thread(target=self._deliver, args=[results])
        yield StepResult()
        asyncio.get_running_loop().call_soon(thread.start)  # when the first message is written
        try:
            while (result := await results.next()) is not None:
                assert isinstance(result, StepResult)
                self.num_in_loop += 1
                yield result
        finally:
            await asyncio.to_thread(thread.join)

    def _deliver(self, results: Results) -> None:
        for number, size in enumerate(self._sizes):
            results.deliver(StepResult(step_id=number + 1, token_ids=[number] * size))
        results.deliver(None)


@asynccontextmanager
async def _call(servicer: _Writers, path: Path, *, is_local: bool = True) -> AsyncIterator[Any]:
    server = rpc.Server([f"unix:{path}/s"], shutdown_timeout=0)
    server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, "pagewire.v1.ExecutorService")
    await server.start()
    if not is_local:
        (path / "s.stream").unlink()
    async with rpc.channel(f"unix:{path}/s") as channel:
        yield executor_pb2_grpc.ExecutorServiceStub(channel).Execute(wait_for_ready=True)
    await server.stop()


@pytest.mark.parametrize("is_local", [True, False])
async def test_results_of_all_sizes_arrive_in_order(tmp_path: Path, is_local: bool) -> None:
    servicer = _Writers()
    async with _call(servicer, tmp_path, is_local=is_local) as call:
        assert await call.read() == StepResult()
        for number, size in enumerate(SIZES):
            result = await call.read()
            assert (result.step_id, len(result.token_ids)) == (number + 1, size) and result.token_ids[-1] == number
        assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_small_result_needs_the_event_loop_only_over_grpc(tmp_path: Path, is_local: bool) -> None:
    servicer = _Writers([1])
    async with _call(servicer, tmp_path, is_local=is_local) as call:
        assert [(await call.read()).step_id for _ in range(2)] == [0, 1]
        assert await call.read() is grpc.aio.EOF
    assert servicer.num_in_loop == (0 if is_local else 1)


async def test_after_the_end_of_a_call_nothing_is_written(tmp_path: Path) -> None:
    servicer = _Writers()
    async with _call(servicer, tmp_path) as call:
        await call.read()
        call.cancel()
        await servicer.has_ended.wait()
        assert servicer.writer is not None and not servicer.writer.try_write(StepResult())
