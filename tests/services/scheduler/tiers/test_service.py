"""Tiers over real gRPC, with fake executors."""

import asyncio
from pathlib import Path

import grpc
import pytest

from pagewire.services.scheduler.placement.integrity import check_integrity
from pagewire.v1.admin_pb2 import (
    ExplainRequestRequest,
    ResetPrefixCacheRequest,
    SleepModelRequest,
    WakeModelRequest,
)
from pagewire.v1.admin_pb2_grpc import AdminServiceStub
from tests.fakes import FakeExecutor, FakeExecutorServicer, FakeTier, expected_output
from tests.services.scheduler.service_line import ServiceLine, generate_request

PROMPT = list(range(1, 50))  # three blocks and a token


def servicer(tier: FakeTier, **executor: int) -> FakeExecutorServicer:
    return FakeExecutorServicer(lambda: FakeExecutor(vocab_size=100, tier=tier, **executor))  # type: ignore[arg-type]


async def cached_tokens(line: ServiceLine, prompt: list[int] = PROMPT) -> int:
    """Runs a prompt, and returns how many of its tokens were found or loaded."""
    responses = [one async for one in line.stub.Generate(generate_request(prompt, max_tokens=3))]
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    assert token_ids == expected_output(prompt, 3, vocab_size=100)
    check_integrity(line.engine.scheduler)
    return responses[-1].usage.cached_tokens


async def known_blocks(line: ServiceLine, count: int) -> None:
    """Returns when the scheduler knows so many blocks of the tiers."""
    async with asyncio.timeout(10):
        while len(line.engine.scheduler.placement.tier_index) != count:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def forgotten(tier: FakeTier) -> None:
    async with asyncio.timeout(10):
        while tier.blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_an_executor_that_restarts_finds_its_blocks(tmp_path: Path) -> None:
    tier = FakeTier()
    async with ServiceLine(tmp_path, servicer(tier)).running() as line:
        await line.wait_for_executors(1)
        assert [await cached_tokens(line) for _ in range(2)] == [0, 48]
        await line.kill_executor()
        await line.wait_for_executor(False)
        await line.start_executor(servicer(tier))
        await line.wait_for_executor(True)
        assert await cached_tokens(line) == 48, "a prompt waits until it is known what the tiers hold"
        assert line.executor.executor.num_executed_tokens == 3
        await line.wait_until_free()


async def test_a_reset_reaches_the_tiers(tmp_path: Path) -> None:
    tier = FakeTier()
    async with ServiceLine(tmp_path, servicer(tier)).running() as line:
        await line.wait_for_executors(1)
        assert await cached_tokens(line) == 0
        await known_blocks(line, 3)
        line.executor.may_forget.clear()
        reset = asyncio.ensure_future(AdminServiceStub(line.channel).ResetPrefixCache(ResetPrefixCacheRequest()))
        await known_blocks(line, 0)
        assert await cached_tokens(line) == 0  # nothing is loaded before the executor has forgotten
        assert not reset.done()
        line.executor.may_forget.set()
        assert (await reset).num_blocks == 3
        assert not tier.blocks
        assert line.executor.executor.num_executed_tokens == 2 * (49 + 2)


async def test_a_reset_that_does_not_reach_a_tier_is_an_error(tmp_path: Path) -> None:
    tier = FakeTier()
    async with ServiceLine(tmp_path, servicer(tier)).running() as line:
        await line.wait_for_executors(1)
        assert await cached_tokens(line) == 0
        line.executor.may_forget.clear()
        reset = asyncio.ensure_future(AdminServiceStub(line.channel).ResetPrefixCache(ResetPrefixCacheRequest()))
        await known_blocks(line, 0)
        await line.kill_executor()
        with pytest.raises(grpc.aio.AioRpcError, match="has not forgotten what its tiers hold") as error:
            await reset
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert tier.blocks
        successor = servicer(tier)
        successor.may_forget.clear()
        await line.start_executor(successor)
        await line.wait_for_executor(True)
        assert await cached_tokens(line) == 0, "nothing is loaded before the executor has forgotten"
        successor.may_forget.set()
        await forgotten(tier)


@pytest.mark.parametrize("first", [0, 1])
async def test_a_scheduler_that_starts_learns_of_a_reset_that_an_executor_missed(first: int, tmp_path: Path) -> None:
    told, missed = FakeTier(), FakeTier()
    told.reset_at = 9
    async with ServiceLine(tmp_path, servicer(missed)).running() as line:
        await line.wait_for_executors(1)
        assert await cached_tokens(line) == 0
        await known_blocks(line, 3)
    async with ServiceLine(tmp_path, servicer(missed), servicer(told)).running(with_executor=False) as line:
        await line.start_executor(index=first)
        await line.wait_for_executors(1)
        await line.start_executor(index=1 - first)
        await line.wait_for_executors(2)
        await forgotten(missed)
        async with asyncio.timeout(10):
            while missed.reset_at != 9:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_a_reset_that_none_can_remember_is_an_error(tmp_path: Path) -> None:
    tier = FakeTier()
    async with ServiceLine(tmp_path, servicer(tier)).running() as line:
        await line.wait_for_executors(1)
        assert await cached_tokens(line) == 0
        await known_blocks(line, 3)
        await line.kill_executor()
        await line.wait_for_executor(False)
        with pytest.raises(grpc.aio.AioRpcError, match="is away: it forgets what its tiers hold when it is back"):
            await AdminServiceStub(line.channel).ResetPrefixCache(ResetPrefixCacheRequest())
        await line.start_executor(servicer(tier))
        await forgotten(tier)


async def test_the_wait_for_a_load_is_a_phase_of_the_request(tmp_path: Path) -> None:
    tier = FakeTier()
    async with ServiceLine(tmp_path, servicer(tier)).running() as line:
        await line.wait_for_executors(1)
        assert await cached_tokens(line) == 0
        await known_blocks(line, 3)
        await line.kill_executor()
        await line.wait_for_executor(False)
        await line.start_executor(servicer(tier))
        await line.wait_for_executor(True)
        responses = [one async for one in line.stub.Generate(generate_request(PROMPT, max_tokens=3, external_id="r"))]
        assert responses[-1].usage.cached_tokens == 48
        account = await AdminServiceStub(line.channel).ExplainRequest(ExplainRequestRequest(request_id="r"))
        names = [phase.name for phase in account.accounts[0].phases]
        assert names == ["queue", "load", "queue", "prefill", "decode"]


async def test_a_reset_reaches_the_tiers_of_an_executor_that_sleeps(tmp_path: Path) -> None:
    tier = FakeTier()
    async with ServiceLine(tmp_path, servicer(tier)).running() as line:
        await line.wait_for_executors(1)
        assert await cached_tokens(line) == 0
        await known_blocks(line, 3)
        admin = AdminServiceStub(line.channel)
        await admin.SleepModel(SleepModelRequest(level=1))
        await admin.ResetPrefixCache(ResetPrefixCacheRequest())
        line.executor.may_forget.clear()
        await admin.WakeModel(WakeModelRequest())
        assert await cached_tokens(line) == 0  # nothing is loaded before the executor has forgotten
        line.executor.may_forget.set()
        await forgotten(tier)
