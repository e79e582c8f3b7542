"""Processes of a line, at a tokenizer service that is not well."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from pagewire.process.supervisor import Supervisor
from pagewire.stack.line_processes import LineProcesses
from pagewire.stack.lines.line import Load
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.pagewire.stack.lines.fake_processes import settings_of


class Tokenizer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with `answer`; None: it hangs."""

    def __init__(self) -> None:
        self.answer: inference_pb2.CountRequestsResponse | None = None
        self.asked = asyncio.Event()
        self.server = grpc.aio.server()

    async def CountRequests(
        self, request: inference_pb2.CountRequestsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.CountRequestsResponse:
        self.asked.set()
        if self.answer is None:
            await asyncio.Event().wait()
        assert self.answer is not None
        return self.answer


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[tuple[LineProcesses, Tokenizer]]:
    processes = LineProcesses(settings_of("a"), directory, Supervisor([], shutdown_timeout=0.0), lambda: 1.0)
    tokenizer = Tokenizer()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(tokenizer, tokenizer.server)
    tokenizer.server.add_insecure_port(processes.address)
    await tokenizer.server.start()
    try:
        yield processes, tokenizer
    finally:
        await tokenizer.server.stop(0.0)
        await processes.end()


async def test_the_end_of_a_line_does_not_cancel_what_asks_for_its_load(tmp_path: Path) -> None:
    async with running(tmp_path) as (processes, tokenizer):
        asking = asyncio.create_task(processes.load())
        await tokenizer.asked.wait()
        ending = asyncio.create_task(processes.end())
        await asyncio.sleep(0)
        await tokenizer.server.stop(0.0)  # as with the processes
        await ending
        assert await asking is None


async def test_the_load_is_unknown_until_the_tokenizer_service_knows_whether_the_model_sleeps(tmp_path: Path) -> None:
    async with running(tmp_path) as (processes, tokenizer):
        tokenizer.answer = inference_pb2.CountRequestsResponse(num_requests=3)
        assert await processes.load() is None
        tokenizer.answer.sleep_level = 1
        assert await processes.load() == Load(3, 0.0, is_asleep=True)
