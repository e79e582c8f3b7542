"""Calls about tiers: what they hold, forgetting and reading blocks, and the part of a step that moves blocks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial

import grpc

from pagewire.services.executor.parallel.group import LEADER
from pagewire.services.executor.service.session import Outcome
from pagewire.services.executor.step.step import Step
from pagewire.services.executor.tiers.contents import HASH_BYTES, Changes, Key
from pagewire.services.executor.tiers.joined import OtherRanks, format_of_rank
from pagewire.services.executor.tiers.loads import LOAD_S, Load, Loaded
from pagewire.services.executor.tiers.messages import KINDS, blocks_of, hashes_of, keys_of, loaded_to_proto, with_moves
from pagewire.services.executor.tiers.runner import TieredRunner
from pagewire.services.executor.tiers.sources import Sources
from pagewire.v1 import executor_pb2
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError

_MAX_HASHES = 30_000  # in a message
_MESSAGE_BYTES = 4 * 1024 * 1024  # of contents in a message, unless one block is larger
_OPENING_S = 5.0  # longest wait for a directory that is slow to list
_OPEN_EVERY_S = 0.02


class ServedTiers:
    """The tiers of a runner. Used on the event loop."""

    def __init__(
        self,
        runner: TieredRunner,
        model_digest: str,
        channel: Callable[[str], grpc.aio.Channel] = rpc.channel,
        others: OtherRanks | None = None,
    ) -> None:
        """model_digest: of everything but the weights that the contents of a block depend on. channel: makes one to
        another executor. others: the other ranks of this executor."""
        self._tiers, self._others = runner.tiers, others
        self._model_digest = model_digest
        self._sources = Sources(runner.tiers, channel)
        if others is None:  # executors do not send parts of blocks
            runner.tiers.loads.fetch = self._sources.fetch
        self._num_blocks = [group.num_blocks for group in runner.kv_groups]

    async def describe(self, response: executor_pb2.DescribeResponse) -> None:
        """Adds the tiers to a description that has the weights in force; they hold blocks of these from now on."""
        tiers = self._tiers
        text = f"{self._model_digest} {response.weights.digest}"
        kv_format = hashlib.sha256(text.encode()).hexdigest()
        if self._others is None:
            tiers.open(kv_format)
            response.kv_format = kv_format
        else:
            tiers.open(format_of_rank(kv_format, LEADER, self._others.num_ranks))
            self._others.open(kv_format)
        for group, size in zip(response.kv_groups, tiers.whole.blocks, strict=True):
            group.block_bytes = size
        if tiers.host.is_tier:
            response.kv_tiers.append(self._tier("host", tiers.whole.host, tiers.host.name))
        if tiers.disk is not None and await asyncio.to_thread(tiers.disk.wait_open, _OPENING_S):
            try:
                store = await asyncio.to_thread(tiers.disk.directory.store_id)
            except OSError:
                store = f"{response.incarnation:016x}"  # of a directory that cannot be written now
            response.kv_tiers.append(self._tier("disk", tiers.disk.directory.max_bytes, store))
        with contextlib.suppress(OSError):  # all is forgotten again
            response.reset_at = await asyncio.to_thread(tiers.reset_at)

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
        loads = [self._load(load, partial(_deliver, deliver)) for load in message.loads]
        for load in loads:
            asyncio.get_running_loop().call_later(LOAD_S, self._tiers.loads.give_up, load)
        return with_moves(step, blocks_of(message.saves, self._num_blocks), loads)

    def _load(self, message: executor_pb2.KVLoad, report: Callable[[Loaded], None]) -> Load:
        blocks, number = blocks_of(message.blocks, self._num_blocks), message.load_id
        if self._others is not None:
            number, report = self._others.loads.join(number, report), self._others.loads.on_loaded
        return Load(number, blocks, report, message.source)

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

    async def forget(self, blocks: Sequence[executor_pb2.BlockHashes], reset_at: int = 0) -> None:
        """Forgets blocks in every tier; none: all, by a reset of this time."""
        keys = [key for one in blocks for key in self._known(one)]
        if not keys and blocks:
            return
        try:
            await asyncio.to_thread(self._tiers.forget, keys)
            if self._others is not None:
                await asyncio.to_thread(self._others.forget, blocks)
            if not blocks and reset_at:
                await asyncio.to_thread(self._tiers.keep_reset, reset_at)
        except OSError as error:
            message = f"--kv-offloading-dir: blocks that are to be forgotten cannot be deleted: {error}"
            raise RpcError(grpc.StatusCode.UNAVAILABLE, message) from error

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
        return keys_of(blocks.group, blocks.hashes)

    async def close(self) -> None:
        """Ends calls and threads."""
        self._sources.close()
        await asyncio.to_thread(self._tiers.close)


def _deliver(deliver: Callable[[Outcome], None], loaded: Loaded) -> None:
    deliver(executor_pb2.StepResult(step_id=-1, loaded=[loaded_to_proto(loaded)]))


def _changes(name: str, changes: Changes) -> list[executor_pb2.TierChanges]:
    """Returns the changes of a tier as messages of bounded size."""
    kind = KINDS[name]
    messages = [executor_pb2.TierChanges(kind=kind, cleared=True)] if changes.cleared else []
    messages += [executor_pb2.TierChanges(kind=kind, removed=sets) for sets in _sets(changes.removed)]
    return messages + [executor_pb2.TierChanges(kind=kind, stored=sets) for sets in _sets(changes.stored)]


def _sets(keys: Sequence[Key]) -> Iterator[list[executor_pb2.BlockHashes]]:
    for start in range(0, len(keys), _MAX_HASHES):
        yield hashes_of(keys[start : start + _MAX_HASHES])


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

    async def forget(self, blocks: Sequence[executor_pb2.BlockHashes], reset_at: int = 0) -> None: ...

    async def read(self, request: executor_pb2.ReadBlocksRequest) -> AsyncIterator[executor_pb2.BlockContents]:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, "this executor keeps no blocks")
        yield

    async def close(self) -> None: ...
