"""The executor process: from its flags to health, and how it ends."""

import asyncio
import dataclasses
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor import main
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service.controls import Controls
from pagewire.services.executor.start.startup import start_runner
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.health import grpc_problem
from tests.services.executor.helpers.stepping import CPU, BrokenRunner, tiny_llama, write_tiny_llama
from tests.services.executor.service.test_servicer import first_step, next_step

SERVICE = "pagewire.v1.ExecutorService"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ExecutorConfig]:
    model = str(write_tiny_llama(tmp_path / "tiny"))
    with tempfile.TemporaryDirectory(prefix="pw-") as sockets:
        yield ExecutorConfig(
            model=model, listen=f"unix:{sockets}/executor.sock", device="cpu", load_format="dummy", shutdown_timeout=1
        )


async def until_serving(address: str) -> None:
    async with asyncio.timeout(60), rpc.channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def test_serves_until_sigterm(config: ExecutorConfig):
    serving = asyncio.create_task(main.serve(config))
    await until_serving(config.listen)
    async with rpc.channel(config.listen) as channel:
        described = await executor_pb2_grpc.ExecutorServiceStub(channel).Describe(executor_pb2.DescribeRequest())
    assert described.model_info.model == config.model
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


async def until_not_ready(address: str) -> None:
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(grpc_problem, address, SERVICE):  # noqa: ASYNC110 - the executor's state
            await asyncio.sleep(0.01)


async def test_after_sigterm_what_runs_may_end(config: ExecutorConfig):
    serving = asyncio.create_task(main.serve(dataclasses.replace(config, shutdown_timeout=60)))
    await until_serving(config.listen)
    async with rpc.channel(config.listen) as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
        for step in (executor_pb2.StepRequest(), first_step([5, 6, 7])):
            await call.write(step)
            await call.read()
        os.kill(os.getpid(), signal.SIGTERM)
        await until_not_ready(config.listen)
        for step_id in range(2, 5):
            await call.write(next_step(step_id))
            assert len((await call.read()).token_ids) == 1
        assert not serving.done()
        await call.write(executor_pb2.StepRequest(step_id=5, finished_request_ids=[7]))
        await call.read()
        await serving


async def test_what_still_runs_is_cut_off_in_the_end(config: ExecutorConfig):
    serving = asyncio.create_task(main.serve(dataclasses.replace(config, shutdown_timeout=0.1)))
    await until_serving(config.listen)
    async with rpc.channel(config.listen) as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
        for step in (executor_pb2.StepRequest(), first_step([5, 6, 7])):
            await call.write(step)
            await call.read()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call.read()
        await serving


async def test_is_alive_but_not_serving_while_it_loads(config: ExecutorConfig, monkeypatch: pytest.MonkeyPatch):
    loading = asyncio.Event()
    loop, go_on = asyncio.get_running_loop(), asyncio.Event()

    def slow_start(
        config: ExecutorConfig, model_path: str, progress: Callable[[float, str], None]
    ) -> tuple[ModelRunner, ExecutorInfo]:
        loop.call_soon_threadsafe(loading.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
        return start_runner(config, model_path, progress)

    monkeypatch.setattr(main, "start_tiered", slow_start)
    serving = asyncio.create_task(main.serve(config))
    await loading.wait()
    assert await asyncio.to_thread(grpc_problem, config.listen) is None
    assert "NOT_SERVING" in (await asyncio.to_thread(grpc_problem, config.listen, SERVICE) or "")
    go_on.set()
    await until_serving(config.listen)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


async def test_what_cannot_be_served_ends_the_process_with_the_reason(config: ExecutorConfig):
    with pytest.raises(StartupError, match="raise --kv-cache-memory-bytes"):
        await main.serve(dataclasses.replace(config, kv_cache_memory_bytes=1000))
    (Path(config.model) / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    with pytest.raises(StartupError, match="NoSuchModel"):
        await main.serve(dataclasses.replace(config, model_impl="pagewire"))


class Unhurried(Controls):
    """Reports a failure late, as in a process with much else to do."""

    async def Execute(
        self, request_iterator: AsyncIterator[executor_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.StepResult]:
        try:
            async for result in super().Execute(request_iterator, context):
                yield result
        except rpc.RpcError:
            await asyncio.sleep(0.1)
            raise


@pytest.mark.parametrize("servicer", [Controls, Unhurried])
async def test_a_fatal_device_error_ends_the_process_after_the_stream_reports_it(
    config: ExecutorConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, servicer: type[Controls]
):
    def start(
        config: ExecutorConfig, model_path: str, progress: Callable[[float, str], None]
    ) -> tuple[ModelRunner, ExecutorInfo]:
        runner, info = start_runner(config, model_path, progress)
        return BrokenRunner(tiny_llama(tmp_path / "broken"), runner.limits, info.num_blocks, CPU), info

    monkeypatch.setattr(main, "start_tiered", start)
    monkeypatch.setattr(main, "Controls", servicer)
    serving = asyncio.create_task(main.serve(config))
    await until_serving(config.listen)
    async with rpc.channel(config.listen) as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
        for step_id in (0, 1):  # the opening message, then a step
            await call.write(executor_pb2.StepRequest(step_id=step_id))
            assert (await call.read()).step_id == step_id
        await call.write(executor_pb2.StepRequest(step_id=2))
        with pytest.raises(grpc.aio.AioRpcError, match="unspecified launch failure"):
            await call.read()
        with pytest.raises(StartupError, match="unspecified launch failure"):
            await serving
    for watchdog in [thread for thread in threading.enumerate() if thread.name == "watchdog"]:
        watchdog.join(10)
        assert not watchdog.is_alive(), "it would end this process, as the device does nothing any more"


def test_progress_is_a_log_line_twice_a_second(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    progress = main.LoadProgress()
    with caplog.at_level("INFO", logger="pagewire.services.executor.main"):
        for percent in range(100):
            progress(percent / 100, f"layer {percent}")
    assert caplog.messages[0] == "loading 0.00 layer 0" and len(caplog.messages) < 10


async def test_an_executor_stopped_as_a_first_step_is_on_its_way_ends_after_it() -> None:
    worker = SimpleNamespace(is_idle=True, failed=Future())
    ending = asyncio.create_task(main._until_idle(cast(Any, worker)))
    await asyncio.sleep(0.1)
    worker.is_idle = False  # the step has arrived
    await asyncio.sleep(0.5)
    assert not ending.done()
    worker.is_idle = True
    await asyncio.wait_for(ending, 10)
