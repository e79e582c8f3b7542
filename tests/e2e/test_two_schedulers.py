"""Two schedulers before one executor, both real: the later one has it, the earlier one waits until it is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from pagewire import rpc
from pagewire.config import SchedulerConfig
from pagewire.services.executor.model_runner import ModelRunner
from pagewire.services.scheduler.engine import Engine
from pagewire.services.scheduler.main import make_server
from pagewire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.services.executor.stepping import CPU, LIMITS, alone, prompt, tiny_llama
from tests.services.executor.test_servicer import INFO, NUM_BLOCKS, serving

Stub: TypeAlias = scheduler_pb2_grpc.SchedulerServiceStub
GREEDY = common_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)


@asynccontextmanager
async def scheduler(
    directory: Path, name: str, executor: str
) -> AsyncIterator[scheduler_pb2_grpc.SchedulerServiceStub]:
    address = f"unix:{directory}/{name}.sock"
    config = SchedulerConfig(listen=address, executor_address=executor, shutdown_timeout=1.0)
    async with rpc.channel(executor) as behind, rpc.channel(address) as channel:
        engine = Engine(config, [behind])
        server = make_server(config, engine, [behind])
        await server.start()
        working = asyncio.create_task(engine.run())
        yield scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await server.stop()
        await rpc.cancel([working])


async def generate(stub: Stub, token_ids: list[int], started: asyncio.Event) -> list:
    request = scheduler_pb2.TokenRequest(prompt_token_ids=token_ids, sampling_params=GREEDY)
    tokens: list[int] = []
    async for response in stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(request=request)):
        tokens += response.token_ids
        started.set()
    return tokens


async def test_the_later_scheduler_has_the_executor_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagewire.services.executor.servicer.TERM_HELD_S", 0.5)
    model = tiny_llama(tmp_path / "model")
    expected = {length: alone(model, prompt(length), 60) for length in (9, 12)}
    executor = f"unix:{tmp_path}/executor.sock"
    async with (
        serving(executor, lambda: (ModelRunner(model, LIMITS, NUM_BLOCKS, CPU), INFO)),
        scheduler(tmp_path, "earlier", executor) as earlier,
    ):
        started = asyncio.Event()
        interrupted = asyncio.create_task(generate(earlier, prompt(9), started))
        await started.wait()
        async with scheduler(tmp_path, "later", executor) as later:
            for _ in range(3):
                assert await generate(later, prompt(12), started) == expected[12]
            async with asyncio.timeout(10):
                while "refuses this scheduler (FAILED_PRECONDITION" not in caplog.text:
                    await generate(later, prompt(12), started)
            assert caplog.text.count("lost the executor") == 1, "nobody takes it from the later one"
            assert not interrupted.done()
        assert await asyncio.wait_for(interrupted, 20) == expected[9], "not a token lost or repeated"
