"""An executor with tiers over a real unix socket, with a tiny model behind it, and a few lines of a scheduler."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
from prometheus_client import REGISTRY

from pagewire.config import ExecutorConfig
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.tiers.runner import TieredRunner
from pagewire.services.executor.tiers.start import with_tiers
from pagewire.services.executor.tiers.tiers import Tiers
from pagewire.v1 import common_pb2, executor_pb2, executor_pb2_grpc
from pagewire.wire import rpc
from tests.services.executor.helpers.servicers import servicer_of
from tests.services.executor.helpers.stepping import BLOCK_SIZE, CPU, LIMITS
from tests.services.executor.service.test_servicer import INFO, NUM_BLOCKS

GREEDY = common_pb2.SamplingParams(temperature=0)


@dataclass
class Service:
    stub: executor_pb2_grpc.ExecutorServiceStub
    runner: TieredRunner
    calls: Counter[str]  # that it was asked for

    @property
    def tiers(self) -> Tiers:
        return self.runner.tiers

    async def describe(self) -> executor_pb2.DescribeResponse:
        return await self.stub.Describe(executor_pb2.DescribeRequest())

    async def opened(self) -> Stream:
        """Returns a stream, which begins with an empty cache."""
        await self.describe()
        call = self.stub.Execute()
        await call.write(executor_pb2.StepRequest())
        assert await call.read() == executor_pb2.StepResult()
        return Stream(call)


@asynccontextmanager
async def serving(address: str, config: ExecutorConfig, model: Model, digest: str = "w1") -> AsyncIterator[Service]:
    """Serves `model`, with the files that the config names. digest: of its weights."""
    worker = Worker(
        lambda: (with_tiers(config, assemble(model, LIMITS, NUM_BLOCKS, CPU)), replace(INFO, weights_digest=digest)),
        on_cuda=False,
    )
    server = rpc.Server([address], shutdown_timeout=1.0)
    servicer, calls = servicer_of(worker, config), Counter[str]()
    read_blocks = servicer.ReadBlocks

    def counting(*arguments: Any) -> Any:
        calls["ReadBlocks"] += 1
        return read_blocks(*arguments)

    servicer.ReadBlocks = counting  # type: ignore[method-assign, assignment]
    server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, "pagewire.v1.ExecutorService")
    await server.start()
    worker.start()
    try:
        await asyncio.wrap_future(worker.loaded)
        await server.set_serving(True)
        async with rpc.channel(address) as channel:
            runner = worker.runner
            assert isinstance(runner, TieredRunner)
            yield Service(executor_pb2_grpc.ExecutorServiceStub(channel), runner, calls)
    finally:
        await server.stop()
        worker.stop()
        await servicer.close()


def counted(name: str, **labels: str) -> float:
    """Returns the value of a counter of this process."""
    return REGISTRY.get_sample_value(f"pagewire:{name}_total", labels) or 0.0


def hashes_of(token_ids: Sequence[int]) -> list[bytes]:
    """Returns the hash of each full block: of its tokens and all before them."""
    ends = range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)
    return [hashlib.sha256(repr(list(token_ids[:end])).encode()).digest() for end in ends]


def blocks(ids: Sequence[int], hashes: Sequence[bytes], group: int = 0) -> executor_pb2.BlockSet:
    return executor_pb2.BlockSet(group=group, ids=ids, hashes=b"".join(hashes))


@dataclass
class Stream:
    """Steps of one request at a time."""

    call: grpc.aio.StreamStreamCall
    step_id: int = 0
    request_id: int = 0

    async def step(self, **fields: Any) -> None:
        self.step_id += 1
        await self.call.write(executor_pb2.StepRequest(step_id=self.step_id, **fields))

    async def result(self) -> executor_pb2.StepResult:
        """Returns the next result of a step."""
        while (result := await asyncio.wait_for(self.call.read(), 20)) is not grpc.aio.EOF:
            if result.step_id >= 0:
                return result
        raise EOFError

    async def generate(
        self,
        token_ids: Sequence[int],
        ids: Sequence[int],
        num_tokens: int,
        *,
        computed: int = 0,
        saves: Sequence[executor_pb2.BlockSet] = (),
    ) -> list[int]:
        """Returns the tokens of a new request; its blocks hold its first `computed` tokens. saves: of its first
        step."""
        self.request_id += 1
        request = executor_pb2.NewRequest(
            request_id=self.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=computed,
            blocks=[executor_pb2.Blocks(ids=ids)],
            sampling_params=GREEDY,
        )
        await self.step(
            new_requests=[request],
            request_ids=[self.request_id],
            num_scheduled_tokens=[len(token_ids) - computed],
            num_new_blocks=[0],
            saves=saves,
        )
        tokens = list((await self.result()).token_ids)
        while len(tokens) < num_tokens:
            await self.step(request_ids=[self.request_id], num_scheduled_tokens=[1], num_new_blocks=[0])
            tokens += (await self.result()).token_ids
        await self.step(finished_request_ids=[self.request_id])
        await self.result()
        return tokens

    async def load(
        self, sets: Sequence[executor_pb2.BlockSet], source: str = "", load_id: int = 1
    ) -> executor_pb2.KVLoaded:
        """Returns the outcome of a load, in a step with nothing else."""
        await self.step(loads=[executor_pb2.KVLoad(load_id=load_id, blocks=sets, source=source)])
        step, loaded = None, None
        while step is None or loaded is None:
            result = await asyncio.wait_for(self.call.read(), 20)
            if result.step_id < 0:
                (loaded,) = result.loaded
            else:
                step = result
        return loaded
