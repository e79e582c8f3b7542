"""The end of services: by which signal, in which order."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_link_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.health import grpc_problem

NAME, LINK = "pagewire.v1.InferenceService", "pagewire.v1.InferenceLinkService"
WAITS = """
import asyncio, sys
from pagewire.wire import rpc
async def main():
    signalled = asyncio.create_task(rpc.wait_for_signal())
    await asyncio.sleep(0)
    print("waits", flush=True)
    print(await signalled, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize(("number", "drains"), [(signal.SIGTERM, "True"), (signal.SIGINT, "False")])
def test_the_first_signal_says_how_to_end_and_the_second_ends(number: signal.Signals, drains: str) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"waits\n"
        process.send_signal(number)
        assert process.stdout.readline().decode().strip() == drains
        process.send_signal(number)
        assert process.wait(60) == -number
        assert process.stderr.read() == b"", "no traceback of what it interrupts"


class Slow(inference_pb2_grpc.InferenceServiceServicer, inference_link_pb2_grpc.InferenceLinkServiceServicer):
    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        self.begun.set()
        await self.go_on.wait()
        return inference_pb2.TokenizeResponse(token_ids=[1])

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse()


async def serving(slow: Slow, address: str, drain_delay: float | None, shutdown_timeout: float = 20) -> rpc.Server:
    server = rpc.Server([address], shutdown_timeout, drain_delay=drain_delay)
    server.add(slow, inference_pb2_grpc.add_InferenceServiceServicer_to_server, NAME)
    server.add(slow, inference_link_pb2_grpc.add_InferenceLinkServiceServicer_to_server, LINK, is_link=True)
    await server.start()
    await server.set_serving(True)
    return server


async def problem(address: str, name: str) -> str | None:
    return await asyncio.to_thread(grpc_problem, address, name)


async def until_not_serving(address: str) -> None:
    async with asyncio.timeout(10):
        while not await problem(address, NAME):  # noqa: ASYNC110 - the server's state
            await asyncio.sleep(0.01)


async def test_a_server_of_neighbours_serves_them_until_the_end(tmp_path: Path) -> None:
    slow, address = Slow(), f"unix:{tmp_path}/s.sock"
    server = await serving(slow, address, None)
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = asyncio.ensure_future(stub.Tokenize(inference_pb2.TokenizeRequest()))
        await slow.begun.wait()
        stopping = asyncio.create_task(server.stop(lambda: asyncio.shield(call)))
        await until_not_serving(address)
        assert await problem(address, LINK) is None, "neighbours need not know"
        assert await problem(address, "") is None, "it is alive"
        await server.set_serving(True)  # as what is behind it comes and goes
        assert "NOT_SERVING" in (await problem(address, NAME) or "")
        await stub.ListModels(inference_pb2.ListModelsRequest())
        slow.go_on.set()
        assert list((await call).token_ids) == [1]
    await stopping


async def test_a_server_of_clients_lets_calls_end_and_refuses_new_ones(tmp_path: Path) -> None:
    slow, address = Slow(), f"unix:{tmp_path}/s.sock"
    server = await serving(slow, address, 0.0)
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = asyncio.ensure_future(stub.Tokenize(inference_pb2.TokenizeRequest()))
        await slow.begun.wait()
        stopping = asyncio.create_task(server.stop(lambda: asyncio.shield(call)))
        await until_not_serving(address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await stub.ListModels(inference_pb2.ListModelsRequest())
        # gRPC cancels the one that is on its way as the server closes its doors.
        if caught.value.code() is grpc.StatusCode.CANCELLED:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListModels(inference_pb2.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        slow.go_on.set()
        assert list((await call).token_ids) == [1]
    await stopping


@pytest.mark.parametrize("drains", [True, False])
async def test_clients_learn_why_they_are_disconnected(tmp_path: Path, drains: bool) -> None:
    slow, address = Slow(), f"unix:{tmp_path}/s.sock"
    server = await serving(slow, address, 0.0, shutdown_timeout=0.1)
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = asyncio.ensure_future(stub.Tokenize(inference_pb2.TokenizeRequest()))
        await slow.begun.wait()
        await server.stop(slow.go_on.wait if drains else None)
        with pytest.raises(grpc.aio.AioRpcError, match="this service is shutting down; try again") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
