"""A scheduler service over real gRPC, with a fake executor behind it, on unix sockets in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.compose import make_engine
from pagewire.services.scheduler.kv_events.prefix_caches import PrefixCaches
from pagewire.services.scheduler.main import make_server, report_availability
from pagewire.services.scheduler.placement.integrity import check_integrity
from pagewire.v1 import common_pb2, scheduler_link_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectResponse, TokenSubmission
from pagewire.wire import rpc
from pagewire.wire.discovery import Discovery, Static
from pagewire.wire.secure_rpc import NO_TLS
from tests.fakes import FakeExecutorServicer, serve_fake_executor


class ServiceLine:
    """A scheduler and fake executors, one per replica; each can be killed and started again. An index of 0 is the
    default where a method takes one."""

    def __init__(self, directory: Path, *executors: FakeExecutorServicer, name: str = "s", **config: Any) -> None:
        """name: of the scheduler, where several share the directory and its executors."""
        self.scheduler_address = f"unix:{directory}/{name}.sock"
        self.executor_addresses = [f"unix:{directory}/e{index}.sock" for index in range(len(executors))]
        self.executors = list(executors)
        self.config = SchedulerConfig(
            listen=self.scheduler_address,
            executor_address=",".join(self.executor_addresses),
            shutdown_timeout=1.0,
            **config,
        )
        self.discovery: Discovery = Static(self.executor_addresses)
        self._executor_servers: dict[int, rpc.Server] = {}

    @property
    def executor(self) -> FakeExecutorServicer:
        return self.executors[0]

    async def start_executor(self, executor: FakeExecutorServicer | None = None, index: int = 0) -> None:
        """Starts an executor, or replaces it by another one."""
        self.executors[index] = executor or self.executors[index]
        address = self.executor_addresses[index]
        self._executor_servers[index] = await serve_fake_executor(address, self.executors[index])

    async def drain_executor(self, drained: Callable[[], Awaitable[object]], index: int = 0) -> None:
        """Ends as after a signal, when `drained` returns."""
        server = self._executor_servers[index]
        server.shutdown_timeout = 20
        await server.stop(drained)
        del self._executor_servers[index]

    async def kill_executor(self, index: int = 0) -> None:
        await self._executor_servers.pop(index).stop()

    @contextlib.asynccontextmanager
    async def running(self, *, with_executor: bool = True) -> AsyncIterator["ServiceLine"]:
        """Starts the line. with_executor: starts the executors, too."""
        if with_executor:
            for index in range(len(self.executors)):
                await self.start_executor(index=index)
        async with contextlib.AsyncExitStack() as stack:
            self.channel = await stack.enter_async_context(rpc.channel(self.scheduler_address))
            self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
            self.link = scheduler_link_pb2_grpc.SchedulerLinkServiceStub(self.channel)
            self.caches = PrefixCaches()
            self.engine = make_engine(self.config, self.discovery, NO_TLS.listed_channel, self.caches)
            self.server = make_server(self.config, self.engine, caches=self.caches)
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
                for index in list(self._executor_servers):
                    await self.kill_executor(index)

    async def wait_for_executors(self, count: int) -> None:
        """Waits until the scheduler has so many executors."""
        async with asyncio.timeout(10):
            while True:
                if (await self.load()).num_executors == count:
                    return
                await asyncio.sleep(0.01)

    async def wait_for_executor(self, present: bool) -> None:
        """Waits until the scheduler has an executor, or has noticed that it has none."""
        async with asyncio.timeout(10):
            while True:
                if (self.engine.scheduler.info is not None) == present:
                    return
                await asyncio.sleep(0.01)

    async def wait_for_waiting(self, count: int) -> None:
        """Waits until so many requests wait."""
        async with asyncio.timeout(10):
            while True:
                if (await self.load()).num_waiting >= count:
                    return
                await asyncio.sleep(0.01)

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        return await self.stub.GetLoad(scheduler_pb2.GetLoadRequest())

    async def wait_until_free(self) -> scheduler_pb2.GetLoadResponse:
        """Waits until nothing runs or waits and all blocks are free."""
        async with asyncio.timeout(10):
            while True:
                load = await self.load()
                if not load.num_running and not load.num_waiting and 0 < load.num_blocks == load.num_free_blocks:
                    check_integrity(self.engine.scheduler)
                    return load
                await asyncio.sleep(0.01)


def token_submission(
    number: int,
    prompt: Sequence[int],
    resume: Sequence[int] = (),
    *,
    external_id: str = "",
    cache_salt: str = "",
    adapter: str = "",
    adapter_digest: str = "",
    **params: Any,
) -> TokenSubmission:
    request = scheduler_pb2.TokenRequest(
        prompt_token_ids=prompt,
        external_id=external_id,
        cache_salt=cache_salt,
        adapter=adapter,
        sampling_params=common_pb2.SamplingParams(**params),
    )
    return TokenSubmission(request_id=number, request=request, resume_token_ids=resume, adapter_digest=adapter_digest)


def generate_request(*args: Any, **kwargs: Any) -> scheduler_pb2.SchedulerServiceGenerateRequest:
    return scheduler_pb2.SchedulerServiceGenerateRequest(request=token_submission(0, *args, **kwargs).request)


class Collected:
    """The responses of a Connect stream, by request."""

    def __init__(self) -> None:
        self.hellos: list[common_pb2.ModelInfo] = []
        self.token_ids: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, list[int]] = {}
        self.errors: dict[int, common_pb2.RequestError] = {}
        self.prompt_logprobs: dict[int, list[common_pb2.Logprobs]] = {}
        self.weights_versions: dict[int, str] = {}
        self.num_responses = 0

    def add(self, response: SchedulerLinkServiceConnectResponse) -> None:
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
            if i in response.prompt_logprobs:
                self.prompt_logprobs.setdefault(number, []).append(response.prompt_logprobs[i])
            if i in response.weights_versions:
                assert number not in self.weights_versions, "reported twice"
                self.weights_versions[number] = response.weights_versions[i]
            if i in response.errors:
                self.errors[number] = response.errors[i]

    async def read_until_finished(self, call: grpc.aio.StreamStreamCall, *numbers: int) -> None:
        async with asyncio.timeout(20):
            while not set(numbers) <= self.finish_reasons.keys():
                response = await call.read()
                assert response is not grpc.aio.EOF, "the stream ended"
                self.add(response)
