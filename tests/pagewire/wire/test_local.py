"""Streams between neighbours on one machine: the same contract as over gRPC."""

import asyncio
import gc
import socket
import stat
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import executor_pb2_grpc
from pagewire.v1.executor_pb2 import StepRequest, StepResult
from pagewire.wire import rpc
from pagewire.wire.local import server as server_module
from pagewire.wire.local.channel import LocalCall
from pagewire.wire.local.pipe import MESSAGE, Frame, Pipe
from pagewire.wire.status import error_details
from pagewire.wire.streams.link import Link
from pagewire.wire.streams.stream_end import StreamEnd

Handle = Callable[[AsyncIterator[StepRequest]], AsyncIterator[StepResult]]


class _Servicer(executor_pb2_grpc.ExecutorServiceServicer):
    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.num_ended = 0
        self.has_ended = asyncio.Event()
        self.is_over_grpc = False  # the last call
        self.metadata: object = None

    def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[StepResult]:
        context.add_done_callback(self._on_done)
        self.is_over_grpc, self.metadata = hasattr(context, "peer"), context.invocation_metadata()
        return self._handle(request_iterator)

    def _on_done(self, context: Any) -> None:
        self.num_ended += 1
        self.has_ended.set()


@asynccontextmanager
async def _serving(
    path: Path, handle: Handle, *interceptors: grpc.aio.ServerInterceptor
) -> AsyncIterator[tuple[rpc.Server, _Servicer, Any]]:
    """A server, its servicer, and a function that opens a call to it."""
    servicer = _Servicer(handle)
    server = rpc.Server([f"unix:{path}"], shutdown_timeout=0, interceptors=interceptors)
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
        with pytest.raises(asyncio.InvalidStateError, match="the stream has ended"):
            await call.write(StepRequest())


async def test_a_server_without_the_socket_is_reached_over_grpc(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo) as (_, servicer, execute):
        (tmp_path / "s.stream").unlink()
        call = execute(wait_for_ready=True)
        await call.write(StepRequest(step_id=5))
        assert (await call.read()).step_id == 5
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert servicer.is_over_grpc


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


@pytest.mark.parametrize(
    ("frames", "code", "words"),
    [
        ([(2, b"/pagewire.v1.ExecutorService/Execute")], grpc.StatusCode.INVALID_ARGUMENT, "kind 2"),
        ([(0, b"\xff\x00nothing")], grpc.StatusCode.UNIMPLEMENTED, "there is no method"),
        ([None], grpc.StatusCode.RESOURCE_EXHAUSTED, "4294967295 bytes"),
        ([(0, b"/pagewire.v1.ExecutorService/Execute"), (9, b"x")], grpc.StatusCode.INVALID_ARGUMENT, "kind 9"),
        ([(0, b"/pagewire.v1.ExecutorService/Execute"), (2, b"\xff")], grpc.StatusCode.INVALID_ARGUMENT, "kind 2"),
        ([(0, b"/pagewire.v1.ExecutorService/Execute"), None], grpc.StatusCode.RESOURCE_EXHAUSTED, "4294967295 bytes"),
    ],
)
async def test_wrong_frames_are_answered_with_a_status(
    tmp_path: Path, frames: list[tuple[int, bytes] | None], code: grpc.StatusCode, words: str
) -> None:
    """None: a frame of 4 GiB, of which the beginning is sent."""
    async with _serving(tmp_path / "s", _echo):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s.stream")
        for frame in frames:
            kind, data = frame or (0, b"of many")
            writer.write((0xFFFFFFFF if frame is None else len(data)).to_bytes(4, "little") + bytes([kind]) + data)
        answer = await reader.read()
        assert answer[4] == 2
        status = Status.FromString(answer[5:])
        assert status.code == code.value[0] and words in status.message
        writer.close()


async def test_what_a_client_sent_is_freed_when_it_leaves(tmp_path: Path) -> None:
    """Memory of connections does not wait for the garbage collector, which may come late."""
    is_freed = asyncio.Event()

    class Watched(server_module._Connection):
        def __init__(self, max_bytes: int) -> None:
            super().__init__(max_bytes)
            weakref.finalize(self, is_freed.set)

    gc.disable()
    try:
        with mock.patch.object(server_module, "_Connection", Watched):
            async with _serving(tmp_path / "s", _echo):
                _, writer = await asyncio.open_unix_connection(tmp_path / "s.stream")
                writer.write((1_000_000).to_bytes(4, "little") + b"\0" + b"x" * 500_000)
                await writer.drain()
                writer.close()
                await is_freed.wait()
    finally:
        gc.enable()


async def test_a_client_that_reads_nothing_holds_the_server_back(tmp_path: Path) -> None:
    num_made = 0

    async def counted(requests: AsyncIterator[StepRequest]) -> AsyncIterator[StepResult]:
        nonlocal num_made
        async for result in _endless(requests):
            num_made += 1
            yield result

    async with (
        _serving(tmp_path / "s", counted) as (_, servicer, execute),
        _serving(tmp_path / "other", _echo) as (_, _, execute_other),
    ):
        call, other = execute(), execute_other()
        await call.read()
        before = -1
        while before != num_made:  # until it makes no more while another stream goes on
            before = num_made
            for _ in range(3):
                await other.write(StepRequest())
                await other.read()
        assert num_made * 100_000 < 20_000_000
        for _ in range(num_made + 5):
            await call.read()
        reading = asyncio.create_task(_read_on(call))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await _ended(servicer)


async def _ended(servicer: _Servicer) -> None:
    async with asyncio.timeout(10):
        await servicer.has_ended.wait()


async def _read_on(call: LocalCall) -> None:
    while True:
        await call.read()


@pytest.mark.parametrize("is_local", [True, False])
async def test_after_a_cancellation_nothing_is_read_or_written(tmp_path: Path, is_local: bool) -> None:
    async with _serving(tmp_path / "s", _echo) as (_, servicer, execute):
        if not is_local:
            (tmp_path / "s.stream").unlink()
        call = execute(wait_for_ready=True)
        for step_id in range(3):
            await call.write(StepRequest(step_id=step_id))
        assert (await call.read()).step_id == 0
        assert call.cancel()  # the other results are there, or come
        for _ in range(2):
            with pytest.raises(asyncio.CancelledError):
                await call.read()
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(StepRequest())
        assert not call.cancel()
        await _ended(servicer)
        assert servicer.is_over_grpc != is_local


async def test_a_call_that_is_cancelled_at_once_is_never_read(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo) as (_, _, execute):
        call = execute()
        assert call.cancel() and not call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()


class _StartingOver:
    """The user of a link that wants another stream when a message comes."""

    def __init__(self, execute: Any) -> None:
        self.link = Link[StepRequest, StepResult]("executor", execute, self)
        self.received: list[int] = []
        self.end: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()

    async def on_connect(self, send: Callable[[StepRequest], Any]) -> None:
        for step_id in range(3):
            await send(StepRequest(step_id=step_id))

    def on_message(self, message: StepResult) -> None:
        self.received.append(message.step_id)
        self.link.start_over("it gets other weights")

    def on_disconnect(self, end: StreamEnd) -> None:
        if not self.end.done():
            self.end.set_result(end)


async def test_a_link_that_starts_over_at_a_message_keeps_its_reason(tmp_path: Path) -> None:
    async def at_once(requests: AsyncIterator[StepRequest]) -> AsyncIterator[StepResult]:
        received = [await anext(requests) for _ in range(3)]
        for request in received:
            yield StepResult(step_id=request.step_id)
        await asyncio.Event().wait()

    async with _serving(tmp_path / "s", at_once) as (_, servicer, execute), asyncio.timeout(10):
        owner = _StartingOver(execute)
        running = asyncio.create_task(owner.link.run())
        assert await owner.end == StreamEnd("it gets other weights", starts_over=True)
        assert owner.received == [0] and not servicer.is_over_grpc
        await servicer.has_ended.wait()
        running.cancel()
        await asyncio.wait({running})


async def test_one_message_wakes_all_that_wait(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo) as (_, _, execute), asyncio.timeout(10):
        call = execute()
        waiting = [asyncio.create_task(work) for work in (call.read(), call.initial_metadata(), call.read())]
        for step_id in range(2):
            await call.write(StepRequest(step_id=step_id))
        first, metadata, second = await asyncio.gather(*waiting)
        assert (first.step_id, len(metadata), second.step_id) == (0, 0, 1)


async def test_a_channel_that_closes_cancels_its_calls(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo) as (_, servicer, _), asyncio.timeout(10):
        channel = rpc.channel(f"unix:{tmp_path}/s")
        execute = executor_pb2_grpc.ExecutorServiceStub(channel).Execute
        call = execute()
        await call.write(StepRequest())
        await call.read()
        opening, reading = execute(), asyncio.create_task(call.read())
        await channel.close()
        ends = await asyncio.gather(reading, opening.read(), return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
        await _ended(servicer)
        with pytest.raises(grpc.aio.UsageError, match="closed"):
            await execute().read()


async def test_a_call_that_is_dropped_ends_at_the_server(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s", _echo) as (_, servicer, execute):
        call = execute()
        await call.write(StepRequest())
        await call.read()
        del call
        await _ended(servicer)


class _Recording(grpc.aio.ServerInterceptor):
    def __init__(self, name: str, names: list[str]) -> None:
        self._name, self._names = name, names

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> grpc.RpcMethodHandler:
        self._names.append(self._name)
        assert handler_call_details.invocation_metadata is not None
        return await continuation(handler_call_details)


class _Refusing(grpc.aio.ServerInterceptor):
    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> grpc.RpcMethodHandler:
        async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
            await rpc.RpcError(grpc.StatusCode.PERMISSION_DENIED, "not you").abort(context)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


@pytest.mark.parametrize("is_local", [True, False])
async def test_interceptors_see_and_may_refuse_each_call(tmp_path: Path, is_local: bool) -> None:
    names: list[str] = []
    order = [_Recording("first", names), _Recording("second", names)]
    for path, interceptors in ((tmp_path / "a", order), (tmp_path / "b", [*order, _Refusing()])):
        async with _serving(path, _echo, *interceptors) as (_, servicer, execute):
            if not is_local:
                path.with_name(f"{path.name}.stream").unlink()
            call = execute()
            await call.write(StepRequest(step_id=1))
            if interceptors is order:
                assert (await call.read()).step_id == 1
                assert servicer.is_over_grpc != is_local and (not is_local or servicer.metadata == ())
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="not you") as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert names == ["first", "second"] * 2


async def test_a_file_at_the_path_of_the_socket_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "s.stream").write_text("mine")
    async with _serving(tmp_path / "s", _echo) as (_, servicer, execute):
        call = execute(wait_for_ready=True)
        await call.write(StepRequest(step_id=5))
        assert (await call.read()).step_id == 5 and servicer.is_over_grpc
    assert (tmp_path / "s.stream").read_text() == "mine"
    assert "use gRPC, which costs more" in caplog.text


async def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "s.stream"))
    async with _serving(tmp_path / "s", _echo) as (_, servicer, execute):
        call = execute()
        await call.write(StepRequest(step_id=5))
        assert (await call.read()).step_id == 5 and not servicer.is_over_grpc


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
    async with _serving(path, _echo) as (_, servicer, execute):
        call = execute(wait_for_ready=True)
        await call.write(StepRequest(step_id=5))
        assert (await call.read()).step_id == 5
        assert servicer.is_over_grpc
    assert "use gRPC, which costs more" in caplog.text
