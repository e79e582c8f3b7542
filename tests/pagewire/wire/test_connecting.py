"""Connections to neighbours that are slow, away or back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pagewire.client import Client
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError


class _Models(inference_pb2_grpc.InferenceServiceServicer):
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="m")])


@asynccontextmanager
async def serving(address: str) -> AsyncIterator[None]:
    server = rpc.Server([address], shutdown_timeout=0)
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    server.add(_Models(), add, "pagewire.v1.InferenceService")
    await server.start()
    try:
        yield
    finally:
        await server.stop()


@asynccontextmanager
async def paused(path: Path, behind: Path, seconds: float) -> AsyncIterator[None]:
    """Listens at `path` and takes connections, but does nothing with one for so long: a process that has no core."""
    tasks: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        there, back = await asyncio.open_unix_connection(str(behind))
        tasks.update(asyncio.create_task(carry(*pair)) for pair in ((reader, back), (there, writer)))

    async with await asyncio.start_unix_server(connected, str(path)):
        yield
    for task in tasks:
        task.cancel()


async def test_a_neighbour_may_take_its_time_to_accept_a_connection(tmp_path: Path) -> None:
    behind, path = tmp_path / "behind.sock", tmp_path / "s.sock"
    async with serving(f"unix:{behind}"), paused(path, behind, seconds=0.6), Client(f"unix:{path}") as client:
        assert [model.id for model in await client.models()] == ["m"]


async def test_the_deadline_of_a_call_holds_while_it_connects(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with paused(path, tmp_path / "none.sock", seconds=60), rpc.channel(f"unix:{path}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_missing_service_differs_from_a_slow_one(tmp_path: Path) -> None:
    async with Client(f"unix:{tmp_path}/s.sock") as client:
        with pytest.raises(RpcError) as caught:
            await client.models()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
