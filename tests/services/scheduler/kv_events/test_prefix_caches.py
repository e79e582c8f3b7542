"""ResetPrefixCache over gRPC."""

import asyncio
from pathlib import Path

from pagewire.v1.admin_pb2 import ResetPrefixCacheRequest, ResetPrefixCacheResponse
from pagewire.v1.admin_pb2_grpc import AdminServiceStub
from pagewire.wire.admin import Neighbour
from pagewire.wire.caches import CachesBehind
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.services.scheduler.service_line import ServiceLine, generate_request

PROMPT = list(range(1, 50))  # three blocks and a token


def line_of(directory: Path, num_executors: int = 1) -> ServiceLine:
    return ServiceLine(
        directory, *(FakeExecutorServicer(lambda: FakeExecutor(vocab_size=100)) for _ in range(num_executors))
    )


async def cached_tokens(line: ServiceLine) -> int:
    """Computes the prompt, and returns how many of its tokens were found."""
    responses = [one async for one in line.stub.Generate(generate_request(PROMPT, max_tokens=1))]
    return responses[-1].usage.cached_tokens


async def test_a_reset_reaches_all_executors(tmp_path: Path) -> None:
    async with line_of(tmp_path, 2).running() as line:
        await line.wait_for_executors(2)
        assert [await cached_tokens(line) for _ in range(2)] == [0, 48]
        answer = await AdminServiceStub(line.channel).ResetPrefixCache(ResetPrefixCacheRequest())
        assert answer == ResetPrefixCacheResponse(num_blocks=3, num_executors=2)
        assert [await cached_tokens(line) for _ in range(2)] == [0, 48]


async def test_a_tokenizer_service_resets_all_schedulers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with line_of(tmp_path / "a").running() as a, line_of(tmp_path / "b").running() as b:
        await asyncio.gather(*(line.wait_for_executors(1) for line in (a, b)))
        assert [await cached_tokens(line) for line in (a, b)] == [0, 0]
        behind = CachesBehind(lambda: [Neighbour("scheduler", line.scheduler_address, line.channel) for line in (a, b)])
        answer = await behind.reset(ResetPrefixCacheRequest())
        assert answer == ResetPrefixCacheResponse(num_blocks=6, num_executors=2)
        assert [await cached_tokens(line) for line in (a, b)] == [0, 0]
