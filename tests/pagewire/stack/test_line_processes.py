"""Processes of a line, at services that do not answer."""

import asyncio
from pathlib import Path

import grpc

from pagewire.process.supervisor import Supervisor
from pagewire.stack.line_processes import LineProcesses
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.pagewire.stack.lines.fake_processes import settings_of


class _Hanging(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def CountRequests(
        self, request: inference_pb2.CountRequestsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.CountRequestsResponse:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_the_end_of_a_line_does_not_cancel_what_asks_for_its_load(tmp_path: Path) -> None:
    processes = LineProcesses(settings_of("a"), tmp_path, Supervisor([], shutdown_timeout=0.0), lambda: 1.0)
    hanging, server = _Hanging(), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(hanging, server)
    server.add_insecure_port(processes.address)
    await server.start()
    asking = asyncio.create_task(processes.load())
    await hanging.asked.wait()
    ending = asyncio.create_task(processes.end())
    await asyncio.sleep(0)
    await server.stop(0.0)  # as with the processes
    await ending
    assert await asking is None
