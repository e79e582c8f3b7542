"""Blocks of other executors: copied from their memory on the same host, or sent by them.

A source that is gone, slow or of another format has no blocks: they are computed instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import xxhash

from pagewire.services.executor.tiers.contents import HASH_BYTES, Key
from pagewire.services.executor.tiers.loads import Load
from pagewire.services.executor.tiers.shared import OtherMemory
from pagewire.services.executor.tiers.tiers import Tiers
from pagewire.v1 import executor_pb2, executor_pb2_grpc

logger = logging.getLogger(__name__)

_DESCRIBE_S = 2.0
_AGAIN_S = 1.0  # after a source could not be reached


@dataclass(eq=False)
class _Peer:
    """Another executor."""

    channel: grpc.aio.Channel
    stub: executor_pb2_grpc.ExecutorServiceStub
    kv_format: str = ""  # "" = unknown
    memory: OtherMemory | None = None
    lost_at: float = -_AGAIN_S
    has_failed: bool = False


class Sources:
    """Reads blocks of other executors. Made, and closed, on the event loop."""

    def __init__(self, tiers: Tiers, channel: Callable[[str], grpc.aio.Channel]) -> None:
        """channel: makes a channel to an address."""
        self._tiers, self._channel = tiers, channel
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, _Peer] = {}
        self._reading = set[asyncio.Task[None]]()

    def fetch(self, load: Load, indices: Sequence[int], after: Any) -> None:
        """Begins to read these blocks of a load. Called on any thread."""
        self._loop.call_soon_threadsafe(self._begin, load, indices, after)

    def _begin(self, load: Load, indices: Sequence[int], after: Any) -> None:
        task = asyncio.create_task(self._read(load, list(indices), after), name="kv-source")
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read(self, load: Load, indices: list[int], after: Any) -> None:
        peer = self._peers.get(load.source)
        if peer is None:
            channel = self._channel(load.source)
            peer = self._peers[load.source] = _Peer(channel, executor_pb2_grpc.ExecutorServiceStub(channel))
        left = indices
        try:
            if time.monotonic() < peer.lost_at + _AGAIN_S:
                return
            if not peer.kv_format:
                await self._describe(peer, load)
            if peer.kv_format != self._tiers.format:
                peer.kv_format = ""  # it may have other weights soon
                return
            if peer.memory is not None:
                left = await asyncio.to_thread(self._copy, peer.memory, load, left, after)
            if left:
                peer.kv_format = ""  # it may be another process by now
                left = await self._receive(peer, load, left, after)
            peer.has_failed = False
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            peer.kv_format, peer.lost_at = "", time.monotonic()
            if not peer.has_failed:
                peer.has_failed = True
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                logger.warning("no KV blocks from %s, so they are computed: %s", load.source, reason)
        finally:
            for _ in left:
                self._tiers.loads.miss(load, "source")

    async def _describe(self, peer: _Peer, load: Load) -> None:
        timeout = min(_DESCRIBE_S, load.time_left)
        described = await peer.stub.Describe(executor_pb2.DescribeRequest(), timeout=timeout)
        peer.kv_format, peer.memory = described.kv_format, None
        for tier in described.kv_tiers:
            if tier.kind == executor_pb2.KV_TIER_KIND_HOST:
                with contextlib.suppress(OSError, ValueError):  # of another host, user or container
                    peer.memory = OtherMemory(tier.store)

    def _copy(self, memory: OtherMemory, load: Load, indices: Sequence[int], after: Any) -> list[int]:
        """Copies blocks from memory of this host; returns those that are not there."""
        places = memory.places(load.blocks[index][0] for index in indices)

        def fill(key: Key, into: np.ndarray) -> int | None:
            return memory.copy(key, places[key], into)

        return [
            index
            for index in indices
            if load.blocks[index][0] not in places or not self._place(load, index, fill, after)
        ]

    async def _receive(self, peer: _Peer, load: Load, indices: Sequence[int], after: Any) -> list[int]:
        """Lets the source send blocks; returns those that it has not sent."""
        wanted = {load.blocks[index][0]: index for index in indices}
        by_group: dict[int, list[bytes]] = {}
        for group, digest in wanted:
            by_group.setdefault(group, []).append(digest)
        sets = [executor_pb2.BlockHashes(group=group, hashes=b"".join(some)) for group, some in by_group.items()]
        request = executor_pb2.ReadBlocksRequest(kv_format=self._tiers.format, blocks=sets)
        call = peer.stub.ReadBlocks(request, timeout=load.time_left)
        async for message in call:
            for key in await asyncio.to_thread(self._take, message, wanted, load, after):
                del wanted[key]
        return list(wanted.values())

    def _take(self, message: executor_pb2.BlockContents, wanted: dict[Any, int], load: Load, after: Any) -> list[Any]:
        """Loads the blocks of a message; returns their keys."""
        taken, contents = [], np.frombuffer(message.contents, dtype=np.uint8)
        size = self._tiers.block_bytes[message.group] if 0 <= message.group < len(self._tiers.block_bytes) else 0
        for place, checksum in enumerate(message.checksums):
            key = message.group, message.hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
            part = contents[place * size : (place + 1) * size]
            if key not in wanted or len(part) != size or xxhash.xxh3_64_intdigest(part.data) != checksum:
                continue

            def fill(key: Any, into: np.ndarray, part: np.ndarray = part, checksum: int = checksum) -> int:
                np.copyto(into, part)
                return checksum

            if self._place(load, wanted[key], fill, after):
                taken.append(key)
        return taken

    def _place(self, load: Load, index: int, fill: Callable[[Any, np.ndarray], int | None], after: Any) -> bool:
        """Loads a block that `fill` fills; returns False if it has none, or there is no room for long."""
        key, _ = load.blocks[index]
        if load.is_over or (slot := self._tiers.host.acquire(key[0], load.time_left)) is None:
            return False
        if (checksum := fill(key, slot.contents)) is None:
            self._tiers.host.release(slot)
            return False
        self._tiers.loads.place(load, index, slot, "host", after, checksum)
        return True

    def close(self) -> None:
        """Ends all calls."""
        for task in self._reading:
            task.cancel()
        for peer in self._peers.values():
            closing = asyncio.create_task(peer.channel.close())
            self._reading.add(closing)
            closing.add_done_callback(self._reading.discard)
