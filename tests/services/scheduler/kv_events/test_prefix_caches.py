"""ResetPrefixCache and SubscribeKvEvents, most of it over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from pagewire.services.scheduler.kv_events.journal import Journal
from pagewire.v1.admin_pb2 import (
    KvEventsExecutor,
    KvEventsPosition,
    ResetPrefixCacheRequest,
    ResetPrefixCacheResponse,
    SubscribeKvEventsRequest,
    SubscribeKvEventsResponse,
)
from pagewire.v1.admin_pb2_grpc import AdminServiceStub
from pagewire.wire.admin import Neighbour
from pagewire.wire.caches import CachesBehind
from pagewire.wire.rpc import RpcError
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.services.scheduler.kv_events.mirror import Held, Mirror
from tests.services.scheduler.pure_line import PureLine
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


class Watcher:
    """Follows the messages of a line, in the background."""

    def __init__(self, messages: AsyncIterator[SubscribeKvEventsResponse]) -> None:
        self.mirror = Mirror()
        self.error: grpc.aio.AioRpcError | RpcError | None = None
        self._messages = messages
        self._changed = asyncio.Condition()
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async for message in self._messages:
                async with self._changed:
                    self.mirror.take(message)
                    self._changed.notify_all()
        except (grpc.aio.AioRpcError, RpcError) as error:
            self.error = error

    async def until(self, num_blocks: int) -> None:
        """Waits until so many blocks can be found, on all executors."""

        def count() -> int:
            return sum(len(one) for held in self.mirror.hashes().values() for one in held.values())

        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: count() == num_blocks)


async def test_a_subscriber_sees_the_present_and_then_changes(tmp_path: Path) -> None:
    async with line_of(tmp_path).running() as line:
        await line.wait_for_executors(1)
        await cached_tokens(line)
        watcher = Watcher(AdminServiceStub(line.channel).SubscribeKvEvents(SubscribeKvEventsRequest()))
        await watcher.until(3)
        assert [one.token_ids for one in blocks(watcher)] == [(), (), ()], "their requests had ended"
        await AdminServiceStub(line.channel).ResetPrefixCache(ResetPrefixCacheRequest())
        await watcher.until(0)
        await cached_tokens(line)
        await watcher.until(3)
        assert [one.token_ids for one in blocks(watcher)] == [tuple(PROMPT[i : i + 16]) for i in (0, 16, 32)]
        (before,) = watcher.mirror.found
        await line.kill_executor()
        await watcher.until(0)
        await line.start_executor(FakeExecutorServicer(lambda: FakeExecutor(vocab_size=100)))
        await line.wait_for_executor(True)
        await cached_tokens(line)
        await watcher.until(3)
        assert [held for held in watcher.mirror.found if watcher.mirror.found[held]] != [before]
        watcher.task.cancel()


def blocks(watcher: Watcher) -> list[Held]:
    return [one for groups in watcher.mirror.found.values() for found in groups.values() for one in found.values()]


async def test_a_tokenizer_service_merges_all_schedulers_until_one_ends(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with line_of(tmp_path / "a").running() as a, line_of(tmp_path / "b").running() as b:
        await asyncio.gather(*(line.wait_for_executors(1) for line in (a, b)))
        lines = [Neighbour("scheduler", line.scheduler_address, line.channel) for line in (a, b)]
        messages = CachesBehind(lambda: lines).subscribe(SubscribeKvEventsRequest())
        first = [await anext(messages), await anext(messages)]
        assert len({message.source for message in first}) == 2
        assert [message.snapshot_parts_left for message in first] == [1, 1]
        await cached_tokens(b)
        stored = await anext(messages)
        assert len(stored.events[0].stored.hashes) == 3
        await b.server.stop()
        with pytest.raises(RpcError, match=rf"the scheduler at {b.scheduler_address}") as ended:
            await anext(messages)
        assert ended.value.code is grpc.StatusCode.UNAVAILABLE


async def test_without_a_scheduler_there_is_no_stream() -> None:
    with pytest.raises(RpcError, match="no scheduler is available"):
        await anext(CachesBehind(lambda: []).subscribe(SubscribeKvEventsRequest()))


async def test_a_slow_subscriber_is_ended_and_may_subscribe_again() -> None:
    line = PureLine(FakeExecutor(block_size=4))
    line.caches.journal = Journal(max_messages=2)
    messages = line.caches.subscribe(SubscribeKvEventsRequest())
    mirror = Mirror()
    mirror.take(await anext(messages))
    for _ in range(3):
        line.add(PROMPT, max_tokens=1)
        line.run()
        await line.caches.reset(ResetPrefixCacheRequest())
        line.caches.flush()
    with pytest.raises(RpcError, match="subscribe again") as dropped:
        await anext(messages)
    assert dropped.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    again = await anext(line.caches.subscribe(SubscribeKvEventsRequest(after=[mirror.position])))
    assert again.snapshot_parts_left == 1
    resumed = line.caches.subscribe(SubscribeKvEventsRequest(after=[KvEventsPosition(source=again.source, number=2)]))
    assert (await anext(resumed)).number == 3


async def test_messages_are_bounded_by_their_bytes() -> None:
    journal = Journal(max_bytes=100)
    for _ in range(10):
        journal.append(SubscribeKvEventsResponse(executor=KvEventsExecutor(address="a" * 30)))
    assert journal.follows(8) and not journal.follows(6)


async def test_a_large_snapshot_comes_in_parts() -> None:
    line = PureLine(FakeExecutor(block_size=1, num_blocks=3000, vocab_size=5000), max_model_len=4000)
    line.caches.start()
    line.add(range(1, 2502), max_tokens=1)
    line.run()
    messages, mirror = line.caches.subscribe(SubscribeKvEventsRequest()), Mirror()
    left = []
    while mirror.position.source == 0 or mirror.parts_left:
        mirror.take(await anext(messages))
        left.append(mirror.parts_left)
    assert left == [2, 1, 0]
    assert len(mirror.hashes()["executor-0"][0]) == 2501
    assert {one.token_ids for one in mirror.found["executor-0", 1][0].values()} == {(i,) for i in range(1, 2502)}


def test_nothing_is_recorded_before_the_first_subscription() -> None:
    line = PureLine(FakeExecutor(block_size=4))
    line.add(PROMPT, max_tokens=1)
    line.run()
    assert line.replica.kv.recorder is None and not line.soon
