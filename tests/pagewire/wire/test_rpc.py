"""The guarantees that every service relies on: handlers clean up, tasks end."""

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.errors import StartupError
from pagewire.v1 import admin_pb2, executor_pb2, executor_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.admin import Neighbour
from pagewire.wire.behind import replace_behind


class _Endless(executor_pb2_grpc.ExecutorServiceServicer):
    """Answers a step without end; large answers, so that the transport fills up when the client does not read."""

    def __init__(self, *, size: int) -> None:
        self._result = executor_pb2.StepResult(token_ids=[1 << 20] * size)
        self.num_yielded = 0
        self.closed = asyncio.Event()
        self.kept: list[Any] = []

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[executor_pb2.StepResult]:
        self.kept.append(asyncio.current_task())  # keeps the collector from doing the cleaning up
        try:
            while True:
                self.num_yielded += 1
                yield self._result
                await asyncio.sleep(0)
        finally:
            self.closed.set()


class _Refusing(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        raise self._error


async def test_a_replacement_of_weights_reports_a_lost_scheduler(tmp_path: Path) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def refuse(request: admin_pb2.ReplaceWeightsRequest) -> admin_pb2.ReplaceWeightsResponse:
        raise rpc.RpcError(grpc.StatusCode.UNAVAILABLE, "no executor is there")

    refusing = rpc.Server([f"unix:{tmp_path}/refusing"], shutdown_timeout=0)
    refusing.add_admin("scheduler", replace_weights=refuse)
    await refusing.start()
    async with await asyncio.start_unix_server(die, tmp_path / "dying"):
        for name, message in (
            ("dying", "the connection to the scheduler broke .*which weights are in"),
            ("refusing", "^no executor is"),
        ):
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/{name}") as channel:
                neighbours = [Neighbour("scheduler", name, channel)]
                with pytest.raises(rpc.RpcError, match=message) as caught:
                    await replace_behind(neighbours.copy)(admin_pb2.ReplaceWeightsRequest(model="b"))
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    await refusing.stop()


@pytest.mark.parametrize("filler", ["x", "\n", "é", "漢", "😀"])
@pytest.mark.parametrize("meant", [True, False])
async def test_a_status_says_what_a_message_of_any_length_begins_and_ends_with(
    tmp_path: Path, filler: str, meant: bool
) -> None:
    message = f"no model {100_000 * filler}; served: a"
    error = rpc.RpcError(grpc.StatusCode.NOT_FOUND, message) if meant else ValueError(message)
    server = rpc.Server([f"unix:{tmp_path}/s.sock"], shutdown_timeout=0)
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    server.add(_Refusing(error), add, "pagewire.v1.InferenceService")
    await server.start()
    async with rpc.channel(f"unix:{tmp_path}/s.sock") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(inference_pb2.TokenizeRequest())
    assert caught.value.code() == (grpc.StatusCode.NOT_FOUND if meant else grpc.StatusCode.INTERNAL)
    assert "no model" in caught.value.details() and caught.value.details().endswith("served: a")
    await server.stop()


async def test_bytes_that_are_no_request_are_refused_with_one_line_for_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.wire.status.undecodable.Deserializer._last_logged", float("-inf"))
    monkeypatch.setattr("pagewire.wire.status.undecodable.Deserializer._num_unlogged", 0)  # those of other tests
    server = rpc.Server([f"unix:{tmp_path}/s.sock"], shutdown_timeout=0)
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    server.add(_Refusing(AssertionError("it was called")), add, "pagewire.v1.InferenceService")
    await server.start()
    async with rpc.channel(f"unix:{tmp_path}/s.sock") as channel:
        for name in ("Tokenize", "Generate", "Tokenize"):
            method = f"/pagewire.v1.InferenceService/{name}"
            call = channel.unary_stream if name == "Generate" else channel.unary_unary
            with pytest.raises(grpc.aio.AioRpcError, match=f"the request of {method} cannot be decoded") as caught:
                answer = call(method)(b"\xff\xff\xff")
                await (answer.read() if name == "Generate" else answer)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
    await server.stop()
    [record] = caplog.records
    assert record.getMessage().startswith("requests that could not be decoded: 1;") and record.exc_info is None


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("size", [1, 1_000_000])
@pytest.mark.parametrize("read", [True, False])
async def test_a_cancelled_stream_is_cleaned_up_at_once(
    tmp_path: Path, no_collector: None, size: int, read: bool
) -> None:
    servicer = _Endless(size=size)
    server = rpc.Server([f"unix:{tmp_path}/s.sock"], shutdown_timeout=0)
    server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, "pagewire.v1.ExecutorService")
    await server.start()
    async with rpc.channel(f"unix:{tmp_path}/s.sock") as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
        if read:
            await call.read()
        else:
            await call.initial_metadata()
        call.cancel()
        await asyncio.wait_for(servicer.closed.wait(), 10)
    await server.stop()


async def _ends_late(started: asyncio.Event, may_end: asyncio.Event) -> None:
    try:
        started.set()
        await asyncio.Event().wait()
    finally:
        await may_end.wait()


async def test_a_unix_socket_is_private_replaces_a_stale_one_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = rpc.Server([f"unix:{path}"], shutdown_timeout=0)
    await server.start()
    assert path.stat().st_mode & 0o777 == 0o600
    async with rpc.channel(f"unix:{path}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 5)
    await server.stop()
    del server
    gc.collect()
    assert not path.exists()


async def test_a_unix_socket_is_not_taken_from_a_process_that_serves_it(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    first, second = rpc.Server([address], shutdown_timeout=0), rpc.Server([address], shutdown_timeout=0)
    await first.start()
    with pytest.raises(StartupError, match=r"cannot listen on unix:.*another process serves it"):
        await second.start()
    async with rpc.channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 5)
    await first.stop()


async def test_connections_are_bounded(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    server = rpc.Server([address], shutdown_timeout=0, max_connections=2)
    await server.start()

    async def check(channel: grpc.aio.Channel) -> int:
        return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)).status

    async with rpc.channel(address) as first, rpc.channel(address) as third:
        assert await check(first)
        async with rpc.channel(address) as second:
            assert await check(second)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(third)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await check(first) and await check(second)
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await check(third)
                    break
    await server.stop()


async def test_cancel_waits_and_passes_errors_on() -> None:
    async def fails() -> None:
        raise ValueError("a defect")

    started, may_end = asyncio.Event(), asyncio.Event()
    late, failing = asyncio.create_task(_ends_late(started, may_end)), asyncio.create_task(fails())
    await started.wait()
    asyncio.get_running_loop().call_soon(may_end.set)
    with pytest.raises(ValueError, match="a defect"):
        await rpc.cancel([failing, late])
    assert late.cancelled()
    await rpc.cancel([])


async def test_a_task_that_cancels_can_be_cancelled() -> None:
    started, may_end = asyncio.Event(), asyncio.Event()
    late = asyncio.create_task(_ends_late(started, may_end))
    await started.wait()
    cancelling = asyncio.create_task(rpc.cancel([late]))
    await asyncio.sleep(0)
    cancelling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelling
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await late


async def test_errors_of_streams_are_statuses(tmp_path: Path) -> None:
    class Failing(executor_pb2_grpc.ExecutorServiceServicer):
        async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[executor_pb2.StepResult]:
            async for step in request_iterator:
                if step.step_id == 1:
                    yield executor_pb2.StepResult(step_id=1)
                elif step.step_id == 2:
                    raise rpc.RpcError(grpc.StatusCode.NOT_FOUND, "no such thing")
                else:
                    raise ValueError("a defect")

    server = rpc.Server([f"unix:{tmp_path}/s.sock"], shutdown_timeout=0)
    server.add(Failing(), executor_pb2_grpc.add_ExecutorServiceServicer_to_server, "pagewire.v1.ExecutorService")
    await server.start()
    async with rpc.channel(f"unix:{tmp_path}/s.sock") as channel:
        for step_id, code, details in (
            (2, grpc.StatusCode.NOT_FOUND, "no such thing"),
            (3, grpc.StatusCode.INTERNAL, "ValueError: a defect"),
        ):
            call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
            await call.write(executor_pb2.StepRequest(step_id=1))
            assert (await call.read()).step_id == 1
            await call.write(executor_pb2.StepRequest(step_id=step_id))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert (caught.value.code(), caught.value.details()) == (code, details)
    await server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_calls_do_not_wake_threads_that_grpc_has_beside_the_one_that_waits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.pagewire.wire.grpc_threads", "200", str(tmp_path)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(run.stdout) < 100
