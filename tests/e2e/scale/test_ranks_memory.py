"""Memory of an executor of two processes: each keeps and loads its part of KV blocks, and each sleeps."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.wire import rpc
from tests.e2e.scale.test_ranks import Executor, ending, model, sockets
from tests.services.executor.helpers.stepping import BLOCK_SIZE, prompt
from tests.services.executor.tiers.tiered_service import Stream, blocks, hashes_of

__all__ = ["model", "sockets"]  # fixtures
TOKENS = prompt(4 * BLOCK_SIZE + 2)
HASHES = hashes_of(TOKENS)
FIRST, OTHER = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]
NUM_TOKENS = 6


@asynccontextmanager
async def serving(directory: Path, *flags: str) -> AsyncIterator[executor_pb2_grpc.ExecutorServiceStub]:
    executor = Executor(directory, "--block-size", str(BLOCK_SIZE), *flags)
    keeping = asyncio.create_task(executor.keep())
    try:
        async with asyncio.timeout(100), rpc.channel(executor.address) as channel:
            yield executor_pb2_grpc.ExecutorServiceStub(channel)
        assert not executor.endings
    finally:
        await rpc.cancel([keeping])
        executor.process.kill()
        await ending(executor.process)


async def opened(stub: executor_pb2_grpc.ExecutorServiceStub) -> Stream:
    await stub.Describe(executor_pb2.DescribeRequest(), wait_for_ready=True)
    call = stub.Execute()
    await call.write(executor_pb2.StepRequest())
    assert await call.read() == executor_pb2.StepResult()
    return Stream(call)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - the state of files
            await asyncio.sleep(0.01)


async def loaded(stub: executor_pb2_grpc.ExecutorServiceStub) -> tuple[list[int], list[int]]:
    """Loads the blocks of the prompt into an empty cache; returns those that are missing, and the tokens that follow
    from the others."""
    stream = await opened(stub)
    missing = list((await stream.load([blocks(OTHER[:4], HASHES)])).missing)
    computed = BLOCK_SIZE * min([4, *missing])
    tokens = await stream.generate(TOKENS, OTHER, NUM_TOKENS, computed=computed)
    await stream.call.done_writing()
    return missing, tokens


@pytest.mark.parametrize(
    "sizes", [[], ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"]], ids=["tensor", "stages"]
)
async def test_each_process_keeps_its_part_of_a_block_and_sleeps(model: Path, sockets: Path, sizes: list[str]) -> None:
    kept = sockets / "kv"

    def files() -> list[Path]:
        return sorted(kept.glob("*/??/*-0"), key=lambda path: (path.name, path.parent))

    async with serving(sockets, "--model", str(model), *sizes, "--kv-offloading-dir", str(kept)) as stub:
        described = await stub.Describe(executor_pb2.DescribeRequest(), wait_for_ready=True)
        assert [tier.kind for tier in described.kv_tiers] == [executor_pb2.KV_TIER_KIND_DISK]
        assert not described.kv_format, "other executors cannot read parts"
        stream = await opened(stub)
        expected = await stream.generate(TOKENS, FIRST, NUM_TOKENS, saves=[blocks(FIRST[:4], HASHES)])
        await stream.call.done_writing()
        await until(lambda: len(files()) == 2 * len(HASHES))
        parts = [path.stat().st_size for path in files()[:2]]
        assert sum(parts) > described.kv_groups[0].block_bytes > max(parts), "the whole, without headers"
        assert await loaded(stub) == ([], expected)
        for level in (1, 2):
            await stub.Sleep(executor_pb2.SleepRequest(state=executor_pb2.SleepState(level=level)))
            with pytest.raises(grpc.aio.AioRpcError, match="the model sleeps"):
                await opened(stub)
            await stub.Wake(executor_pb2.WakeRequest())
            assert await loaded(stub) == ([], expected)
        for number, which in enumerate((0, 1), start=2):  # a part on either rank
            path = next(one for one in files()[which::2] if one.name.startswith(HASHES[number].hex()))
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert await loaded(stub) == ([2, 3], expected), "what one rank cannot load is computed"
        await stub.ForgetBlocks(executor_pb2.ForgetBlocksRequest(reset_at=7))
        assert not files()
        assert (await stub.Describe(executor_pb2.DescribeRequest())).reset_at == 7
        assert await loaded(stub) == ([0, 1, 2, 3], expected)
