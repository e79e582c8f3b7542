"""Calls about tiers: what they hold, forgetting and reading blocks, and the part of a step that moves blocks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial

import grpc

from pagewire.services.executor.service.session import Outcome
from pagewire.services.executor.step.step import InvalidStep, Step
from pagewire.services.executor.tiers.contents import HASH_BYTES, Changes, Key
from pagewire.services.executor.tiers.loads import LOAD_S, Load, Loaded
from pagewire.services.executor.tiers.runner import TieredRunner, TieredStep
from pagewire.services.executor.tiers.sources import Sources
from pagewire.v1 import executor_pb2
from pagewire.v1.executor_pb2 import KVTierKind
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError

KINDS = {"host": KVTierKind.KV_TIER_KIND_HOST, "disk": KVTierKind.KV_TIER_KIND_DISK}
_MAX_HASHES = 30_000  # in a message
_MESSAGE_BYTES = 4 * 1024 * 1024  # of contents in a message, unless one block is larger
_OPENING_S = 5.0  # longest wait for a directory that is slow to list
_OPEN_EVERY_S = 0.02


class ServedTiers:
    """The tiers of a runner. Used on the event loop."""

    def __init__(
        self, runner: TieredRunner, model_digest: str, channel: Callable[[str], grpc.aio.Channel] = rpc.channel
    ) -> None:
        """model_digest: of everything but the weights that the contents of a block depend on. channel: makes one to
        another executor."""
        self._tiers = runner.tiers
        self._model_digest = model_digest
        self._sources = Sources(runner.tiers, channel)
        runner.tiers.loads.fetch = self._sources.fetch
        self._num_blocks = [group.num_blocks for group in runner.kv_groups]

    async def describe(self, response: executor_pb2.DescribeResponse) -> None:
        """Adds the tiers to a description that has the weights in force; they hold blocks of these from now on."""
        tiers = self._tiers
        text = f"{self._model_digest} {response.weights.digest}"
        tiers.open(hashlib.sha256(text.encode()).hexdigest())
        response.kv_format = tiers.format
        for group, size in zip(response.kv_groups, tiers.block_bytes, strict=True):
            group.block_bytes = size
        if tiers.host.is_tier:
            response.kv_tiers.append(self._tier("host", tiers.host.num_bytes, tiers.host.name))
        if tiers.disk is not None and await asyncio.to_thread(tiers.disk.wait_open, _OPENING_S):
            try:
                store = await asyncio.to_thread(tiers.disk.directory.store_id)
            except OSError:
                store = f"{response.incarnation:016x}"  # of a directory that cannot be written now
            response.kv_tiers.append(self._tier("disk", tiers.disk.directory.max_bytes, store))

    def _tier(self, name: str, num_bytes: int, store: str) -> executor_pb2.KVTier:
        rate = self._tiers.rates[name]
        return executor_pb2.KVTier(
            kind=KINDS[name],
            bytes=num_bytes,
            store=store,
            load_rate=rate.bytes_per_second,
            load_latency=rate.latency,
        )

    # -- steps -------------------------------------------------------------------------------------------------------

    def attach(self, step: Step, message: executor_pb2.StepRequest, deliver: Callable[[Outcome], None]) -> Step:
        """Returns the step with the blocks that it saves and loads. deliver: receives the outcomes of loads, on any
        thread. Raises InvalidStep."""
        loads = [
            Load(load.load_id, self._blocks(load.blocks), partial(_deliver, deliver), load.source)
            for load in message.loads
        ]
        for load in loads:
            asyncio.get_running_loop().call_later(LOAD_S, self._tiers.loads.give_up, load)
        saves = self._blocks(message.saves)
        return TieredStep(**{name: getattr(step, name) for name in step.__dataclass_fields__}, saves=saves, loads=loads)

    def _blocks(self, sets: Iterable[executor_pb2.BlockSet]) -> list[tuple[Key, int]]:
        found: list[tuple[Key, int]] = []
        for blocks in sets:
            if not 0 <= blocks.group < len(self._num_blocks) or len(blocks.hashes) != HASH_BYTES * len(blocks.ids):
                raise InvalidStep(
                    f"{len(blocks.ids)} blocks of group {blocks.group} have {len(blocks.hashes)} bytes of hashes"
                )
            if any(not 0 <= block < self._num_blocks[blocks.group] for block in blocks.ids):
                raise InvalidStep(f"a block of group {blocks.group} is outside of its {self._num_blocks[blocks.group]}")
            found += zip(_keys(blocks.group, blocks.hashes), blocks.ids, strict=True)
        return found

    # -- calls -------------------------------------------------------------------------------------------------------

    async def watch(self) -> AsyncIterator[executor_pb2.TierChanges]:
        """Yields what the tiers hold, then how it changes."""
        if self._tiers.disk is not None:
            await asyncio.to_thread(self._tiers.disk.wait_open, _OPENING_S)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        contents = self._tiers.contents

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        following = {name: one.follow(wake) for name, one in contents.items()}
        try:
            for name, one in following.items():
                for message in _changes(name, contents[name].take(one)):
                    yield message
            yield executor_pb2.TierChanges(is_complete=True)
            while True:
                await changed.wait()
                changed.clear()
                for name, one in following.items():
                    for message in _changes(name, contents[name].take(one)):
                        yield message
        finally:
            for name, one in following.items():
                contents[name].leave(one)

    async def forget(self, blocks: Sequence[executor_pb2.BlockHashes]) -> None:
        """Forgets blocks in every tier; none: all."""
        keys = [key for one in blocks for key in self._known(one)]
        if keys or not blocks:
            await asyncio.to_thread(self._tiers.forget, keys)

    async def read(self, request: executor_pb2.ReadBlocksRequest) -> AsyncIterator[executor_pb2.BlockContents]:
        """Yields the blocks that the tiers hold. Raises RpcError."""
        if not self._tiers.format or request.kv_format != self._tiers.format:
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the blocks of this executor have another format: it serves another model, other weights or types",
            )
        for one in request.blocks:
            message = executor_pb2.BlockContents(group=one.group)
            for key in self._known(one):
                if (found := await asyncio.to_thread(self._tiers.read, key)) is None:
                    continue
                if message.hashes and len(message.contents) + len(found[0]) > _MESSAGE_BYTES:
                    yield message
                    message = executor_pb2.BlockContents(group=one.group)
                message.hashes += key[1]
                message.contents += found[0]
                message.checksums.append(found[1])
            if message.hashes:
                yield message

    def _known(self, blocks: executor_pb2.BlockHashes) -> list[Key]:
        """Returns the keys of blocks that may exist. Raises RpcError."""
        if len(blocks.hashes) % HASH_BYTES or not 0 <= blocks.group < len(self._num_blocks):
            raise RpcError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"group {blocks.group} with {len(blocks.hashes)} bytes of hashes: there are {len(self._num_blocks)} "
                f"groups, and a hash has {HASH_BYTES} bytes",
            )
        return _keys(blocks.group, blocks.hashes)

    def close(self) -> None:
        """Ends calls and threads."""
        self._sources.close()
        self._tiers.close()


def _keys(group: int, hashes: bytes) -> list[Key]:
    return [(group, hashes[start : start + HASH_BYTES]) for start in range(0, len(hashes), HASH_BYTES)]


def _deliver(deliver: Callable[[Outcome], None], loaded: Loaded) -> None:
    message = executor_pb2.KVLoaded(
        load_id=loaded.load_id,
        missing=loaded.missing,
        seconds=loaded.seconds,
        bytes=[executor_pb2.KVTierBytes(kind=KINDS[name], bytes=size) for name, size in loaded.num_bytes.items()],
    )
    deliver(executor_pb2.StepResult(step_id=-1, loaded=[message]))


def _changes(name: str, changes: Changes) -> list[executor_pb2.TierChanges]:
    """Returns the changes of a tier as messages of bounded size."""
    kind = KINDS[name]
    messages = [executor_pb2.TierChanges(kind=kind, cleared=True)] if changes.cleared else []
    messages += [executor_pb2.TierChanges(kind=kind, removed=sets) for sets in _sets(changes.removed)]
    return messages + [executor_pb2.TierChanges(kind=kind, stored=sets) for sets in _sets(changes.stored)]


def _sets(keys: Sequence[Key]) -> Iterator[list[executor_pb2.BlockHashes]]:
    for start in range(0, len(keys), _MAX_HASHES):
        by_group: dict[int, list[bytes]] = {}
        for group, digest in keys[start : start + _MAX_HASHES]:
            by_group.setdefault(group, []).append(digest)
        yield [executor_pb2.BlockHashes(group=group, hashes=b"".join(some)) for group, some in by_group.items()]


class NoTiers:
    """An executor without tiers: it neither saves nor loads."""

    async def describe(self, response: executor_pb2.DescribeResponse) -> None: ...

    def attach(self, step: Step, message: executor_pb2.StepRequest, deliver: Callable[[Outcome], None]) -> Step:
        for load in message.loads:
            missing = list(range(sum(len(blocks.ids) for blocks in load.blocks)))
            _deliver(deliver, Loaded(load.load_id, missing, 0.0, {}))
        return step

    async def watch(self) -> AsyncIterator[executor_pb2.TierChanges]:
        yield executor_pb2.TierChanges(is_complete=True)
        await asyncio.Event().wait()

    async def forget(self, blocks: Sequence[executor_pb2.BlockHashes]) -> None: ...

    async def read(self, request: executor_pb2.ReadBlocksRequest) -> AsyncIterator[executor_pb2.BlockContents]:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, "this executor keeps no blocks")
        yield

    def close(self) -> None: ...
