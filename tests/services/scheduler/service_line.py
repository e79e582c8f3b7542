"""A scheduler service over real gRPC, with a fake executor behind it, on unix sockets in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from pagewire import rpc
from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.engine import Engine
from pagewire.services.scheduler.main import make_server, report_availability
from pagewire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.fakes import FakeExecutorServicer, serve_fake_executor


class ServiceLine:
    """scheduler -> fake executor; the executor can be killed and started again."""

    def __init__(self, directory: Path, executor: FakeExecutorServicer, **config: Any) -> None:
        self.scheduler_address = f"unix:{directory}/s.sock"
        self.executor_address = f"unix:{directory}/e.sock"
        self.executor = executor
        self.config = SchedulerConfig(
            listen=self.scheduler_address, executor_address=self.executor_address, shutdown_timeout=1.0, **config
        )

    async def start_executor(self, executor: FakeExecutorServicer | None = None) -> None:
        """Starts the executor, or another one in its place."""
        self.executor = executor or self.executor
        self._executor_server = await serve_fake_executor(self.executor_address, self.executor)

    async def kill_executor(self) -> None:
        await self._executor_server.stop()

    @contextlib.asynccontextmanager
    async def running(self, *, with_executor: bool = True) -> AsyncIterator["ServiceLine"]:
        if with_executor:
            await self.start_executor()
        async with rpc.channel(self.executor_address) as behind, rpc.channel(self.scheduler_address) as channel:
            self.channel = channel
            self.stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            self.engine = Engine(self.config, [behind])
            self.server = make_server(self.config, self.engine, [behind])
            await self.server.start()
            tasks = [
                asyncio.create_task(self.engine.run()),
                asyncio.create_task(report_availability(self.engine, self.server)),
            ]
            try:
                yield self
            finally:
                await self.server.stop()
                await rpc.cancel(tasks)
                await self.kill_executor()

    async def wait_for_executor(self, present: bool) -> None:
        """Until the scheduler has an executor, or has noticed that it has none."""
        async with asyncio.timeout(10):
            while True:
                if (self.engine.scheduler.info is not None) == present:
                    return
                await asyncio.sleep(0.01)

    async def wait_for_waiting(self, count: int) -> None:
        """Until so many requests wait."""
        async with asyncio.timeout(10):
            while True:
                if (await self.load()).num_waiting >= count:
                    return
                await asyncio.sleep(0.01)

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        return await self.stub.GetLoad(scheduler_pb2.GetLoadRequest())

    async def wait_until_free(self) -> scheduler_pb2.GetLoadResponse:
        """Until nothing runs or waits and all blocks are free."""
        async with asyncio.timeout(10):
            while True:
                load = await self.load()
                if not load.num_running and not load.num_waiting and 0 < load.num_blocks == load.num_free_blocks:
                    self.engine.scheduler.check_integrity()
                    return load
                await asyncio.sleep(0.01)


def token_request(
    number: int, prompt: Sequence[int], resume: Sequence[int] = (), *, external_id: str = "", **params: Any
) -> scheduler_pb2.TokenRequest:
    return scheduler_pb2.TokenRequest(
        request_id=number,
        prompt_token_ids=prompt,
        resume_token_ids=resume,
        external_id=external_id,
        sampling_params=common_pb2.SamplingParams(**params),
    )


def generate_request(*args: Any, **kwargs: Any) -> scheduler_pb2.SchedulerServiceGenerateRequest:
    return scheduler_pb2.SchedulerServiceGenerateRequest(request=token_request(0, *args, **kwargs))


class Collected:
    """What a Connect stream said, request by request."""

    def __init__(self) -> None:
        self.hellos: list[common_pb2.ModelInfo] = []
        self.token_ids: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, list[int]] = {}
        self.errors: dict[int, common_pb2.RequestError] = {}
        self.num_responses = 0

    def add(self, response: scheduler_pb2.SchedulerServiceConnectResponse) -> None:
        if response.HasField("hello"):
            assert not response.request_ids
            self.hellos.append(response.hello)
            return
        self.num_responses += 1
        n = len(response.request_ids)
        assert len(response.num_tokens) == len(response.finish_reasons) == len(response.cached_tokens) == n
        assert sum(response.num_tokens) == len(response.token_ids)
        start = 0
        for i, number in enumerate(response.request_ids):
            end = start + response.num_tokens[i]
            self.token_ids.setdefault(number, []).extend(response.token_ids[start:end])
            start = end
            if response.finish_reasons[i]:
                self.finish_reasons.setdefault(number, []).append(response.finish_reasons[i])
            if i in response.errors:
                self.errors[number] = response.errors[i]

    async def read_until_finished(self, call: grpc.aio.StreamStreamCall, *numbers: int) -> None:
        async with asyncio.timeout(20):
            while not set(numbers) <= self.finish_reasons.keys():
                response = await call.read()
                assert response is not grpc.aio.EOF, "the stream ended"
                self.add(response)
