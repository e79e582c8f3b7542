"""Streams between neighbours on one machine: the same contract as over gRPC."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import executor_pb2_grpc
from pagewire.v1.executor_pb2 import StepRequest, StepResult
from pagewire.wire import rpc
from pagewire.wire.local.channel import LocalCall
from pagewire.wire.local.pipe import MESSAGE, Frame, Pipe
from pagewire.wire.status import error_details

Handle = Callable[[AsyncIterator[StepRequest]], AsyncIterator[StepResult]]


class _Servicer(executor_pb2_grpc.ExecutorServiceServicer):
    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.num_ended = 0

    def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[StepResult]:
        context.add_done_callback(self._on_done)
        return self._handle(request_iterator)

    def _on_done(self, context: Any) -> None:
        self.num_ended += 1


@asynccontextmanager
async def _serving(path: Path, handle: Handle) -> AsyncIterator[tuple[rpc.Server, _Servicer, Any]]:
    """A server, its servicer, and a function that opens a call to it."""
    servicer = _Servicer(handle)
    server = rpc.Server([f"unix:{path}"], shutdown_timeout=0)
    server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, "pagewire.v1.ExecutorService")
    await server.start()
    async with rpc.channel(f"unix:{path}") as channel:
        yield server, servicer, executor_pb2_grpc.ExecutorServiceStub(channel).Execute
    await server.stop()


async def _echo(requests: AsyncIterator[StepRequest]) -> AsyncIterator[StepResult]:
    async for request in requests:
        yield StepResult(step_id=request.step_id, token_ids=request.request_ids)


async def _refuse(requests: AsyncIterator[StepRequest]) -> AsyncIterator[StepResult]:
    yield StepResult(step_id=1)
    raise rpc.RpcError(grpc.StatusCode.ABORTED, "no more", [("field", "why")], reason="SUPERSEDED")


async def _endless(requests: AsyncIterator[StepRequest]) -> AsyncIterator[StepResult]:
    while True:
        yield StepResult(token_ids=[1] * 100_000)


@given(sizes=st.lists(st.integers(0, 40), max_size=8), cuts=st.lists(st.integers(1, 30)))
def test_frames_arrive_whole_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    async def received() -> list[Frame]:
        pipe, rest = Pipe(100), b"".join(size.to_bytes(4, "little") + b"\0" + bytes([size]) * size for size in sizes)
        for cut in [*cuts, len(rest)]:
            pipe.data_received(rest[:cut])
            rest = rest[cut:]
        pipe.connection_lost(None)
        return [frame async for frame in _frames(pipe)]

    assert asyncio.run(received()) == [Frame(MESSAGE, bytes([size]) * size) for size in sizes]


async def _frames(pipe: Pipe) -> AsyncIterator[Frame]:
    while (frame := await pipe.read()) is not None:
        yield frame


async def test_messages_of_all_sizes_arrive_in_order(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo) as (_, servicer, execute):
        call = execute(wait_for_ready=True)
        assert isinstance(call, LocalCall)
        for step_id, size in enumerate((0, 1, 3_000_000, 2)):
            await call.write(StepRequest(step_id=step_id, request_ids=[7] * size))
        for step_id, size in enumerate((0, 1, 3_000_000, 2)):
            result = await call.read()
            assert (result.step_id, len(result.token_ids)) == (step_id, size)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert not call.cancel() and servicer.num_ended == 1


async def test_an_error_arrives_with_its_details(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _refuse) as (_, _, execute):
        call = execute()
        assert (await call.read()).step_id == 1
        for _ in range(2):  # the end stays
            with pytest.raises(grpc.aio.AioRpcError, match="no more") as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert error_details.reason_of(caught.value) == "SUPERSEDED"
        assert error_details.violations_of(caught.value) == [("field", "why")]
        with pytest.raises(grpc.aio.AioRpcError, match="no more"):
            await call.write(StepRequest())


async def test_a_server_without_the_socket_is_reached_over_grpc(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo) as (_, _, execute):
        (tmp_path / "s.stream").unlink()
        call = execute(wait_for_ready=True)
        await call.write(StepRequest(step_id=5))
        assert (await call.read()).step_id == 5
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_method_that_is_not_there_is_unimplemented(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo), rpc.channel(f"unix:{tmp_path}/s") as channel:
        call = channel.stream_stream("/pagewire.v1.Other/Execute", StepRequest.SerializeToString, StepResult.FromString)
        with pytest.raises(grpc.aio.AioRpcError, match="there is no method") as caught:
            await call().read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    servicer = _Servicer(_echo)
    server = rpc.Server([f"unix:{tmp_path}/s"], shutdown_timeout=0, max_request_bytes=1000)
    server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, "pagewire.v1.ExecutorService")
    await server.start()
    async with rpc.channel(f"unix:{tmp_path}/s") as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
        await call.write(StepRequest(request_ids=[1] * 2000))
        with pytest.raises(grpc.aio.AioRpcError, match="2003 bytes; up to 1000 are accepted") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop()


async def test_a_client_that_reads_nothing_holds_the_server_back(tmp_path: Path) -> None:
    num_made = 0

    async def counted(requests: AsyncIterator[StepRequest]) -> AsyncIterator[StepResult]:
        nonlocal num_made
        async for result in _endless(requests):
            num_made += 1
            yield result

    async with _serving(tmp_path / "s", counted) as (_, servicer, execute):
        call = execute()
        await call.read()
        before = -1
        while before != num_made:  # until it makes no more
            before = num_made
            await asyncio.sleep(0.05)
        assert num_made * 100_000 < 20_000_000
        for _ in range(num_made + 5):
            await call.read()
        reading = asyncio.create_task(_read_on(call))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading
        while not servicer.num_ended:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _read_on(call: LocalCall) -> None:
    while True:
        await call.read()


async def test_a_server_that_stops_cuts_its_streams_off(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo) as (server, servicer, execute):
        call = execute()
        await call.write(StepRequest(step_id=1))
        await call.read()
        assert stat.S_IMODE((tmp_path / "s.stream").stat().st_mode) == 0o600
        reading = asyncio.create_task(call.read())
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and not error_details.is_of_service(caught.value)
        assert servicer.num_ended == 1 and not (tmp_path / "s.stream").exists()


async def test_a_path_that_is_too_long_is_told_and_grpc_does_the_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ("s" * (104 - len(str(tmp_path))))  # with .stream, it has more than 107 characters
    async with _serving(path, _echo) as (_, _, execute):
        call = execute(wait_for_ready=True)
        await call.write(StepRequest(step_id=5))
        assert (await call.read()).step_id == 5
    assert "use gRPC, which costs more" in caplog.text
