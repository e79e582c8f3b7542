"""Properties of the messages: whatever happens to the replicas, copies made from messages alone agree with the pools,
and tell what the blocks hold."""

import asyncio
from collections.abc import AsyncIterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.values.block_hashes import ROOT_HASH, hash_block
from pagewire.v1.admin_pb2 import ResetPrefixCacheRequest, SubscribeKvEventsRequest, SubscribeKvEventsResponse
from tests.services.scheduler.core.test_properties import Story, kinds, many_arrivals
from tests.services.scheduler.kv_events.mirror import Held, Mirror
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.strategies import Arrival, lines
from tests.sweep import examples


class Subscriber:
    def __init__(self, line: PureLine) -> None:
        self.line = line
        self.mirror = Mirror()
        self.subscribe()

    def subscribe(self) -> None:
        """Subscribes, again after what it has seen."""
        request = SubscribeKvEventsRequest(after=[self.mirror.position])
        self.messages: AsyncIterator[SubscribeKvEventsResponse] = self.line.caches.subscribe(request)
        self.is_new = self.mirror.position.source == 0

    async def read(self) -> None:
        """Reads all that there is."""
        while self.is_new or self.mirror.parts_left or self.mirror.position.number < self.line.caches.journal.last:
            self.mirror.take(await anext(self.messages))
            self.is_new = False


class WithSubscribers(Story):
    def __init__(self, line: PureLine, to_come: list[Arrival], starts: bool) -> None:
        """starts: the recording begins before the first request."""
        super().__init__(line, to_come)
        self.starts = starts
        self.subscribers: list[Subscriber] = []

    async def play_and_read(self, script: list[tuple[str, int]]) -> None:
        if self.starts:
            self.line.caches.start()
        for kind, number in script:
            if kind == "subscribe":
                self.subscribers.append(Subscriber(self.line))
            elif kind == "resume" and self.subscribers:
                self.subscribers[number % len(self.subscribers)].subscribe()
            elif kind == "read" and self.subscribers:
                await self.check(self.subscribers[number % len(self.subscribers)])
            elif kind == "load" and self.line.executors[0].loads:
                self.line.end_load(lost=[number])
            elif kind == "tell":
                self.line.tell_tiers()
            elif kind == "reset":
                await self.line.caches.reset(ResetPrefixCacheRequest())
            else:
                self.play([(kind, number)])
        self.finish()
        for subscriber in [*self.subscribers, Subscriber(self.line)]:
            await self.check(subscriber)

    async def check(self, subscriber: Subscriber) -> None:
        for function in self.line.soon:
            function()
        self.line.soon.clear()
        await subscriber.read()
        present = {replica.name: found(replica) for replica in self.line.scheduler.replicas if found(replica)}
        assert subscriber.mirror.hashes() == present
        size = self.line.executors[0].block_size
        for groups in subscriber.mirror.found.values():
            for blocks in groups.values():
                for block_hash, block in blocks.items():
                    assert block.token_ids or not self.starts
                    if block.token_ids and not block.extra_keys:
                        assert chained(block, size) == block_hash


def found(replica: Replica) -> dict[int, set[bytes]]:
    held = {number: set(group.pool.hashes) for number, group in enumerate(replica.kv.groups)}
    return {number: hashes for number, hashes in held.items() if hashes}


def chained(block: Held, size: int) -> bytes:
    block_hash = block.parent or block.namespace or ROOT_HASH
    for start in range(0, len(block.token_ids), size):
        block_hash = hash_block(block_hash, block.token_ids[start : start + size])
    return block_hash


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    line=lines(
        st.integers(1, 2),
        windows=st.sampled_from([[], [], [5]]),
        states=st.sampled_from([0, 0, 2, -1]),
        max_draft_tokens=st.just(0),
        has_tier=st.booleans(),
    ),
    to_come=many_arrivals,
    starts=st.booleans(),
    script=st.lists(
        st.tuples(
            st.one_of(kinds, st.sampled_from(["subscribe", "resume", "read", "read", "reset", "load", "tell"])),
            st.integers(0, 2),
        ),
        min_size=20,
        max_size=80,
    ),
)
def test_copies_agree_with_the_pools(line: PureLine, to_come: list[Arrival], starts: bool, script: list) -> None:
    asyncio.run(WithSubscribers(line, to_come, starts).play_and_read(script))
