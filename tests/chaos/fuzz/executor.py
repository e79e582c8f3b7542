"""The executor's streams of steps: whatever a scheduler sends, the device goes on, and the next stream is served."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.start.assembly import assemble
from pagewire.v1 import common_pb2, executor_pb2
from pagewire.wire import rpc
from tests.chaos.fuzz.line import CASE_TIMEOUT_S, Finding
from tests.chaos.fuzz.mutation import Mutator
from tests.services.executor.helpers.stepping import CPU, LIMITS, alone, prompt, tiny_llama
from tests.services.executor.service.test_servicer import (
    INFO,
    NUM_BLOCKS,
    Service,
    first_step,
    generate,
    next_step,
    serving,
)

_NUM_STEPS = 4
_PROMPT = prompt(9)
_SAMPLED = common_pb2.SamplingParams(
    seed=3, temperature=0.7, top_k=5, logprobs=2, prompt_logprobs=1, repetition_penalty=1.1, min_tokens=2,
    logit_bias_ids=[5], logit_bias_values=[2.0], stop_token_ids=[9],
)  # fmt: skip


@dataclass
class FuzzExecutor:
    service: Service
    channel: grpc.aio.Channel
    expected: list[int]  # tokens of a valid stream


@asynccontextmanager
async def running_executor() -> AsyncIterator[FuzzExecutor]:
    """Runs an executor with a tiny model."""
    with tempfile.TemporaryDirectory(prefix="pw-") as name:
        model: Model = tiny_llama(Path(name) / "model")
        address = f"unix:{name}/executor.sock"
        start = lambda: (assemble(model, LIMITS, NUM_BLOCKS, CPU), INFO)  # noqa: E731
        async with serving(address, start) as service, rpc.channel(address) as channel:
            yield FuzzExecutor(service, channel, alone(model, _PROMPT, _NUM_STEPS))


async def fuzz(executor: FuzzExecutor, seed: int) -> None:
    """One case: a stream of which one message is another. Raises Finding."""
    mutator = Mutator(seed)
    params = _SAMPLED if mutator.is_so(0.5) else common_pb2.SamplingParams(temperature=0)
    steps = [first_step(_PROMPT, params=params), *(next_step(number) for number in range(2, _NUM_STEPS + 1))]
    place = mutator.random.choice((0, 0, 0, 1, 2))
    mutated = mutator.message(steps[place])
    data = [step.SerializeToString() for step in steps]
    data[place] = mutated.SerializeToString()
    if mutator.is_so(0.2):
        data[place] = mutator.bytes(data[place])
    said = f"message {place}: {data[place].hex()}"
    try:
        async with asyncio.timeout(CASE_TIMEOUT_S):
            await _stream(executor.channel, data)
            await _check(executor, said)
    except TimeoutError as error:
        raise Finding(f"{said}: no end") from error


async def _stream(channel: grpc.aio.Channel, messages: list[bytes]) -> None:
    """How it ends is the stream's affair."""
    call = channel.stream_stream("/pagewire.v1.ExecutorService/Execute")()
    try:
        for data in (executor_pb2.StepRequest().SerializeToString(), *messages):
            await call.write(data)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        pass


async def _check(executor: FuzzExecutor, said: str) -> None:
    service = executor.service
    if service.worker.failed.done():
        raise Finding(f"{said}: {service.worker.failed.exception()}")
    call = service.stub.Execute()
    await call.write(executor_pb2.StepRequest())
    if await call.read() != executor_pb2.StepResult():
        raise Finding(f"{said}: afterwards no stream can be opened")
    tokens = await generate(call, _NUM_STEPS, _PROMPT)
    call.cancel()
    if tokens != executor.expected:
        raise Finding(f"{said}: afterwards a valid stream has {tokens} for {executor.expected}")
