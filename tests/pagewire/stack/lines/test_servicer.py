"""LineService as gateways and commands call it, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pagewire.config import ServeConfig
from pagewire.flags.lines import StackModels
from pagewire.stack.lines.lines import Lines
from pagewire.stack.lines.plan import Room
from pagewire.stack.lines.servicer import make_server
from pagewire.stack.lines.sizes import KeptSizes
from pagewire.v1 import lines_pb2, lines_pb2_grpc
from pagewire.wire import rpc
from tests.pagewire.stack.lines.fake_processes import FakeProcesses, settings_of

MODEL = '{"model": "all-minilm-l6-v2"'


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[lines_pb2_grpc.LineServiceStub, dict[str, FakeProcesses]]]:
    """Serves two lines, `a` and `b`, of which `a` has unknown names."""
    made: dict[str, FakeProcesses] = {}

    def make(one: object, number: int) -> FakeProcesses:
        name = one.name  # type: ignore[attr-defined]
        made[name] = FakeProcesses(name, [])
        return made[name]

    models = StackModels((settings_of("a"), settings_of("b")), "a")
    lines = Lines(models, Room(100), make, KeptSizes(directory / "lines.json"))
    address = f"unix:{directory}/lines.sock"
    server = make_server(lines, ServeConfig(max_num_seqs=7), address)
    await server.start()
    running = asyncio.create_task(lines.run())
    channel = rpc.channel(address)
    try:
        async with asyncio.timeout(20):
            yield lines_pb2_grpc.LineServiceStub(channel), made
    finally:
        await channel.close()
        running.cancel()
        await asyncio.wait([running])
        await server.stop()


async def test_lines_are_watched_asked_for_added_and_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (stub, processes):
        watch = aiter(stub.WatchLines(lines_pb2.WatchLinesRequest()))

        async def until(name: str, state: int) -> lines_pb2.Line:
            async for seen in watch:
                for line in seen.lines:
                    if (line.name, line.state) == (name, state):
                        return line
            raise AssertionError

        first = await anext(watch)
        assert [line.name for line in first.lines] == ["a", "b"]
        assert (first.default_line, first.memory_bytes, first.lines[0].tokenizer_address) == ("a", 100, "")
        await stub.RequestLine(lines_pb2.RequestLineRequest(name="b", idle_seconds=300))
        ready = await until("b", lines_pb2.LINE_STATE_READY)
        assert (ready.tokenizer_address, ready.num_loads, ready.model.max_model_len) == ("unix:/b/tokenizer.sock", 1, 7)
        assert ready.HasField("rest_time") and not ready.problem
        for call in (  # unknown names are the gateway's: nothing happens to the line that serves them
            stub.RequestLine(lines_pb2.RequestLineRequest(name="no such name")),
            stub.RestLine(lines_pb2.RestLineRequest(name="no such name")),
            stub.DeleteLine(lines_pb2.DeleteLineRequest(name="no such name")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="'no such name' does not exist; served here: a, b"):
                await call

        rested = await stub.RestLine(lines_pb2.RestLineRequest(name="b"))
        assert rested.line.state == lines_pb2.LINE_STATE_ASLEEP and processes["b"].sleeps
        rested = await stub.RestLine(lines_pb2.RestLineRequest(name="b", end_processes=True))
        assert rested.line.state == lines_pb2.LINE_STATE_UNSPECIFIED and not processes["b"].runs

        put = lines_pb2.PutLineRequest(name="c", settings_json=MODEL + ', "aliases": ["d"], "idle_timeout": 5}')
        assert (await stub.PutLine(put)).created and not (await stub.PutLine(put)).created
        added = await until("c", lines_pb2.LINE_STATE_UNSPECIFIED)
        assert (list(added.aliases), added.pinned) == (["d"], False)
        with pytest.raises(grpc.aio.AioRpcError, match="'d' is another name of c: delete that"):
            await stub.DeleteLine(lines_pb2.DeleteLineRequest(name="d"))
        await stub.DeleteLine(lines_pb2.DeleteLineRequest(name="c"))
        async for seen in watch:
            if [line.name for line in seen.lines] == ["a", "b"]:
                break


@pytest.mark.parametrize(
    ("name", "settings", "code", "message"),
    [
        ("a", MODEL + "}", "ALREADY_EXISTS", "the model 'a' is served with other settings: delete it first"),
        ("c", MODEL + ', "aliases": ["a"]}', "ALREADY_EXISTS", "two models are named 'a'"),
        ("c", "{", "INVALID_ARGUMENT", "model 'c': settings are not JSON"),
        ("c", "[" * 100_000, "INVALID_ARGUMENT", "model 'c': settings"),
        ("c", "[]", "INVALID_ARGUMENT", "model 'c': expected keys and values"),
        ("c", "{}", "INVALID_ARGUMENT", "model 'c': model: expected a path or an id"),
        ("c", MODEL + ', "name": "d"}', "INVALID_ARGUMENT", "leave `name` out"),
        ("c", MODEL + ', "model": "x"}', "INVALID_ARGUMENT", "key 'model' is given twice"),
        ("c", MODEL + ', "flags": {"max-model-len": 1}}', "INVALID_ARGUMENT", "model 'c': max-model-len: expected"),
        ("c", MODEL + ', "flags": {"max-model-len": "%s"}}' % ("x" * 100_000), "INVALID_ARGUMENT", "expected a size"),
        ("c", '{"model": "/no/such/model"}', "INVALID_ARGUMENT", "model 'c': --model: no model '/no/such/model'"),
        ("c", '{"model": "%s"}' % ("x" * 100_000), "INVALID_ARGUMENT", "model 'c': model: expected a text of at most"),
        ("c", '{"model": "%s"}' % ("x" * 999), "INVALID_ARGUMENT", "model 'c': model: expected a path"),
        ("c", MODEL + ', "flags": {"%s": 1}}' % ("x" * 100_000), "INVALID_ARGUMENT", "unknown key xxx"),
        ("c", MODEL + ', "%s": 1}' % ("x" * 100_000), "INVALID_ARGUMENT", "unknown key xxx"),
        ("a/../b", MODEL + "}", "INVALID_ARGUMENT", "name: expected a name"),
        ("", MODEL + "}", "INVALID_ARGUMENT", "name is empty"),
        ("x" * 5000, MODEL + "}", "INVALID_ARGUMENT", "name: expected a name of at most 255 characters"),
    ],
)
async def test_wrong_settings_have_one_clear_error(
    tmp_path: Path, name: str, settings: str, code: str, message: str
) -> None:
    async with serving(tmp_path) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.PutLine(lines_pb2.PutLineRequest(name=name, settings_json=settings))
        details = failed.value.details() or ""
        assert failed.value.code().name == code and message in details and len(details) < 1000


async def test_a_line_with_a_problem_is_refused_with_the_time_to_try_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (stub, processes):
        processes["b"].problem = "it is damaged"
        await stub.RequestLine(lines_pb2.RequestLineRequest(name="b"))
        async for seen in stub.WatchLines(lines_pb2.WatchLinesRequest()):
            if seen.lines[1].problem:
                assert seen.lines[1].problem == "it is damaged" and seen.lines[1].HasField("retry_time")
                break
        with pytest.raises(grpc.aio.AioRpcError, match="b: it is damaged") as failed:
            await stub.RequestLine(lines_pb2.RequestLineRequest(name="b"))
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError, match="'x' does not exist; served here: a, b"):
            await stub.DeleteLine(lines_pb2.DeleteLineRequest(name="x"))
