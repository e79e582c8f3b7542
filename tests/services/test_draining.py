"""A scheduler or tokenizer service that is to end says so on the streams that it has, and on new ones."""

import asyncio
from pathlib import Path
from typing import Any

import grpc

from pagewire.v1 import inference_pb2
from pagewire.v1.inference_link_pb2 import ConnectRequest, ConnectResponse, GenerateSubmission
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest
from tests.services.scheduler.service.test_service import make_line, output_of, prompt_of
from tests.services.scheduler.service_line import token_submission
from tests.services.tokenizer.service_line import FakeScheduler, TokenizerLine


async def read(call: Any) -> Any:
    return await asyncio.wait_for(call.read(), 20)


async def test_of_a_scheduler(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        call = line.link.Connect()
        hello = (await read(call)).hello
        line.engine.draining.begin()
        reply = await read(call)
        assert reply.draining and reply.hello == hello
        submission = token_submission(1, prompt_of(1), max_tokens=5)
        await call.write(SchedulerLinkServiceConnectRequest(requests=[submission]))
        tokens: list[int] = []
        while len(tokens) < 5:
            response = await read(call)
            assert not response.draining
            tokens += response.token_ids
        assert tokens == output_of(1, 5), "where there is no other, requests come and are served"
        assert (await read(line.link.Connect())).draining
        await line.engine.drained()
        await line.engine.draining.finish_streams()
        assert await read(call) is grpc.aio.EOF


async def test_a_scheduler_ends_with_the_last_tokens_of_its_streams(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        call = line.link.Connect()
        await read(call)
        submission = token_submission(1, prompt_of(1), max_tokens=5)
        await call.write(SchedulerLinkServiceConnectRequest(requests=[submission]))
        while not line.engine.scheduler.num_running:  # noqa: ASYNC110 - the other side's state
            await asyncio.sleep(0.001)
        await line.engine.drained()
        finishing = asyncio.create_task(line.engine.draining.finish_streams())
        tokens: list[int] = []
        while (response := await read(call)) is not grpc.aio.EOF:
            tokens += response.token_ids
        assert tokens == output_of(1, 5)
        await finishing


async def test_of_a_tokenizer_service(tmp_path: Path, smollm2_gguf: Path) -> None:
    async with TokenizerLine(tmp_path, FakeScheduler(lambda request: [1, 2, 3]), smollm2_gguf).running() as line:
        call = line.gateway_stub.Connect()
        assert await read(call) == ConnectResponse(model="SmolLM2-135M-Instruct.Q4_1")
        line.generator.draining.begin()
        assert await read(call) == ConnectResponse(model="SmolLM2-135M-Instruct.Q4_1", draining=True)
        request = inference_pb2.GenerateRequest(text="The sea", sampling_params={"max_tokens": 3})
        await call.write(ConnectRequest(requests=[GenerateSubmission(number=1, request=request)]))
        response = await read(call)
        assert not response.draining and response.responses[0].number == 1
        assert await read(line.gateway_stub.Connect()) == ConnectResponse(
            model="SmolLM2-135M-Instruct.Q4_1", draining=True
        )
        await line.generator.live.drained()
        await line.generator.draining.finish_streams()
        numbers = []
        while (response := await read(call)) is not grpc.aio.EOF:
            numbers += [one.number for one in response.responses if one.response.finish_reason]
        assert numbers == [1]
