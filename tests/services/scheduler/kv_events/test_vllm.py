"""Events in vLLM's protocol, decoded by its documented layout."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from pagewire.config.values.kv_events import KvEventsConfig, kv_events_config
from pagewire.errors import StartupError
from pagewire.services.scheduler.kv_events.journal import Journal
from pagewire.services.scheduler.kv_events.vllm_format import short_hash
from pagewire.services.scheduler.kv_events.vllm_publisher import Frames, Publisher, RankStream
from pagewire.services.scheduler.kv_events.zmq_sockets import make_publisher
from pagewire.services.scheduler.values.images import PromptImages
from pagewire.v1.admin_pb2 import ResetPrefixCacheRequest
from tests.fakes import FakeExecutor
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.values.test_images import image

PROMPT = list(range(1, 14))  # three blocks of 4 and a token
END = b"\xff" * 8
SUB, DEALER, SUBSCRIBE = 2, 5, 6  # as ZeroMQ numbers them


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def decoded(payload: bytes) -> Batch:
    return msgspec.msgpack.decode(payload, type=Batch)


class Kept:
    """Sockets that keep what they are given."""

    def __init__(self) -> None:
        self.frames: list[Frames] = []

    def publish(self, frames: Frames) -> None:
        self.frames.append(frames)

    def close(self) -> None:
        """There is nothing to close."""

    @property
    def events(self) -> Sequence[BlockStored | BlockRemoved | AllBlocksCleared]:
        return [event for _, _, payload in self.frames for event in decoded(payload).events]


@contextlib.asynccontextmanager
async def published(line: PureLine, config: KvEventsConfig | None = None) -> AsyncIterator[dict[int, Kept]]:
    """Publishes what happens on a line; yields the sockets by rank."""
    sockets: dict[int, Kept] = {}

    def open_sockets(rank: int, stream: RankStream) -> Kept:
        return sockets.setdefault(rank, Kept())

    publisher = Publisher(config or KvEventsConfig(topic="kv@"), line.caches, msgspec.msgpack.encode, open_sockets)
    line.caches.start()
    task = asyncio.create_task(publisher.run())
    try:
        await settled(line)
        yield sockets
    finally:
        task.cancel()


async def settled(line: PureLine) -> None:
    """Returns when all that happened is published, for which every turn of the event loop publishes a message."""
    line.caches.flush()
    for _ in range(100):
        await asyncio.sleep(0)


async def test_blocks_have_vllms_fields() -> None:
    line = PureLine(FakeExecutor(block_size=4, num_blocks=4))
    async with published(line) as sockets:
        line.add(PROMPT, max_tokens=1)
        line.run()
        await settled(line)
        topic, number, payload = sockets[0].frames[-1]
        assert (topic, number) == (b"kv@", (len(sockets[0].frames) - 1).to_bytes(8, "big"))
        batch = decoded(payload)
        assert batch.data_parallel_rank == 0 and batch.ts > 1e9
        (stored,) = batch.events
        assert isinstance(stored, BlockStored)
        hashes = [short_hash(one) for one in line.replica.kv.groups[0].pool.hashes]
        assert stored == BlockStored(
            hashes, None, PROMPT[:12], 4, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
        )
        line.add([50] * 10, max_tokens=1)
        line.run()
        await settled(line)
        removed = [one for one in sockets[0].events if isinstance(one, BlockRemoved)]
        assert [one for event in removed for one in event.block_hashes] == hashes[:0:-1]
        await line.caches.reset(ResetPrefixCacheRequest())
        await settled(line)
        assert sockets[0].events[-1] == AllBlocksCleared()


async def test_what_blocks_depend_on_is_told() -> None:
    line = PureLine(FakeExecutor(block_size=4, max_adapters=1))
    line.executor.loaded_adapters.add("d1")
    line.die()
    async with published(line) as sockets:
        line.add(PROMPT, max_tokens=1, cache_salt="salt")
        line.run()
        line.add(PROMPT, max_tokens=1, adapter_digest="d1")
        line.run()
        line.add(PROMPT, max_tokens=1, images=PromptImages([image(1, 5, 2)], len(PROMPT)))
        line.run()
        await settled(line)
        salted, adapted, pictured = [one for one in sockets[0].events if isinstance(one, BlockStored)]
        assert salted.extra_keys is not None and [len(one or ()) for one in salted.extra_keys] == [1, 0, 0]
        assert adapted.extra_keys is not None and [len(one or ()) for one in adapted.extra_keys] == [2, 1, 1]
        assert adapted.lora_name == "d1" and adapted.extra_keys[1:] == [["d1"], ["d1"]]
        assert pictured.extra_keys is not None and [len(one or ()) for one in pictured.extra_keys] == [0, 1, 0]


@pytest.mark.parametrize(
    ("executor", "kinds"),
    [({"windows": {6: 32}}, ["full_attention", "sliding_window"]), ({"num_blocks": 0, "states": {8: 32}}, ["mamba"])],
)
async def test_groups_are_told_apart(executor: dict, kinds: list[str]) -> None:
    line = PureLine(FakeExecutor(block_size=4, **executor))
    async with published(line) as sockets:
        line.add(PROMPT, max_tokens=1)
        line.run()
        await settled(line)
        stored = [one for one in sockets[0].events if isinstance(one, BlockStored)]
        assert [(one.group_idx, one.kv_cache_spec_kind) for one in stored] == list(enumerate(kinds))
        assert [one.kv_cache_spec_sliding_window for one in stored] == [6 if "win" in kind else None for kind in kinds]


async def test_each_replica_has_a_stream() -> None:
    line = PureLine(FakeExecutor(block_size=4), FakeExecutor(block_size=4))
    async with published(line) as sockets:
        for _ in range(2):
            line.add(PROMPT[::-1], max_tokens=1)
            line.add(PROMPT, max_tokens=1)
        line.run()
        await settled(line)
        for rank in (0, 1):
            assert {decoded(payload).data_parallel_rank for _, _, payload in sockets[rank].frames} == {rank}
            numbers = [int.from_bytes(number, "big") for _, number, _ in sockets[rank].frames]
            assert numbers == list(range(len(numbers)))


async def test_a_publisher_that_falls_behind_begins_again() -> None:
    line = PureLine(FakeExecutor(block_size=4))
    line.caches.journal = Journal(max_messages=1)
    async with published(line) as sockets:
        for _ in range(3):
            line.add(PROMPT, max_tokens=1)
            line.run()
            await line.caches.reset(ResetPrefixCacheRequest())
            line.caches.flush()
        line.add(PROMPT, max_tokens=1)
        line.run()
        await settled(line)
        cleared, stored = sockets[0].events[-2:]
        assert cleared == AllBlocksCleared()
        assert isinstance(stored, BlockStored) and stored.token_ids == PROMPT[:12]


def test_the_latest_batches_are_replayed() -> None:
    stream = RankStream(KvEventsConfig(topic="t", buffer_steps=2))
    for payload in (b"a", b"b", b"c"):
        stream.add(payload)

    def numbered(number: int, payload: bytes) -> Frames:
        return b"me", b"", b"t", number.to_bytes(8, "big"), payload

    end = (b"me", b"", b"", END, b"")
    assert list(stream.replay([b"me", b"", (0).to_bytes(8, "big")])) == [numbered(1, b"b"), numbered(2, b"c"), end]
    assert list(stream.replay([b"me", b"", (2).to_bytes(8, "big")])) == [numbered(2, b"c"), end]
    assert list(stream.replay([b"me", b"", (9).to_bytes(8, "big")])) == [end]
    assert list(stream.replay([b"me", b"?"])) == []


def test_without_an_endpoint_only_this_machine_is_served() -> None:
    config = kv_events_config('{"enable_kv_cache_events": true}')
    assert config.uses_zmq and config.binds and config.of_rank(config.endpoint, 0) == "tcp://127.0.0.1:5557"
    everywhere = kv_events_config('{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}')
    assert everywhere.binds and everywhere.of_rank(everywhere.endpoint, 3) == "tcp://*:5560"
    elsewhere = kv_events_config('{"enable_kv_cache_events": true, "endpoint": "tcp://router:5557"}')
    assert not elsewhere.binds
    assert not kv_events_config('{"enable_kv_cache_events": true, "publisher": "null"}').uses_zmq
    assert not kv_events_config(None).enable_kv_cache_events


async def test_real_sockets_publish_and_replay(tmp_path: object) -> None:
    zmq = pytest.importorskip("zmq.asyncio", reason="needs the extra kv-events")
    line = PureLine(FakeExecutor(block_size=4))
    config = KvEventsConfig(True, endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/replay")
    publisher = make_publisher(config, line.caches)
    with pytest.raises(StartupError, match="cannot bind"):
        make_publisher(KvEventsConfig(True, endpoint="tcp://[2001:db8::1]:1"), line.caches)
    line.caches.start()
    task = asyncio.create_task(publisher.run())
    context = zmq.Context()
    subscriber, asker = context.socket(SUB), context.socket(DEALER)
    subscriber.setsockopt(SUBSCRIBE, b"")
    subscriber.connect(config.endpoint)
    asker.connect(config.replay_endpoint)
    try:
        async with asyncio.timeout(10):
            while not await subscriber.poll(20):  # until the subscription has arrived
                await line.caches.reset(ResetPrefixCacheRequest())
                line.caches.flush()
            _, number, payload = await subscriber.recv_multipart()
            assert decoded(payload).events == [AllBlocksCleared()]
            await asker.send_multipart([b"", number])
            answers = [await asker.recv_multipart()]
            while answers[-1] != [b"", b"", END, b""]:
                answers.append(await asker.recv_multipart())
            assert answers[0] == [b"", b"", number, payload]
    finally:
        task.cancel()
        context.destroy(linger=0)
