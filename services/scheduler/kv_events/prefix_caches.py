"""The prefix caches of all replicas, as AdminService offers them: what they hold, what changes, and resets."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

import grpc

from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.kv_events import metrics
from pagewire.services.scheduler.kv_events.journal import Journal
from pagewire.services.scheduler.kv_events.messages import message_of, snapshot
from pagewire.services.scheduler.kv_events.recorder import Recorder
from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.memory.reset import reset
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.service.seams import AdaptersInForce
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.v1.admin_pb2 import (
    KvEventsExecutor,
    ResetPrefixCacheRequest,
    ResetPrefixCacheResponse,
    SubscribeKvEventsRequest,
    SubscribeKvEventsResponse,
)
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# Calls a function soon, and not within the decision of a step.
CallSoon = Callable[[Callable[[], None]], object]


class Tiers(Protocol):
    """The tiers of executors."""

    def begin_reset(self) -> None:
        """Takes in that the memory of all executors is about to be reset."""

    async def on_reset(self) -> None:
        """Returns when the tiers of executors are reset, too. Raises RpcError UNAVAILABLE if they are not."""


class PrefixCaches:
    """Records nothing before the first subscription, unless `start` was called: until then, steps do nothing more."""

    def __init__(self, journal: Journal | None = None, call_soon: CallSoon | None = None) -> None:
        """call_soon: None: that of the running event loop."""
        self.journal = journal or Journal()
        self._call_soon = call_soon or (lambda function: asyncio.get_running_loop().call_soon(function))
        self._is_recording = False
        self._recorders: dict[int, Recorder] = {}  # by replica id
        self._changed: dict[Recorder, None] = {}  # those with changes to take, in order

    def follow(
        self,
        scheduler: Scheduler,
        drivers: Mapping[int, ReplicaDriver],
        adapters: AdaptersInForce | None,
        tiers: Tiers | None = None,
    ) -> None:
        """Takes in the scheduler that has the caches. drivers: by replica id. tiers: are reset, too. Call this before
        it has executors."""
        self._tiers = tiers
        self._scheduler = scheduler
        self._drivers = drivers
        self._adapters = adapters

    async def reset(self, request: ResetPrefixCacheRequest) -> ResetPrefixCacheResponse:
        """Makes all replicas forget their findable blocks, and the tiers of their executors, those that sleep included.
        Raises RpcError UNAVAILABLE if an executor does not answer."""
        replicas = [replica for replica in self._scheduler.replicas if replica.info is not None]
        if self._tiers is not None:
            self._tiers.begin_reset()
        for replica in replicas:
            if (recorder := self._recorders.get(replica.replica_id)) is not None:
                recorder.clear()
        num_blocks = sum(reset(replica.kv, replica.running) for replica in replicas)
        if self._tiers is not None:
            await self._tiers.on_reset()
        logger.info("the prefix cache was reset; blocks forgotten: %d, executors: %d", num_blocks, len(replicas))
        return ResetPrefixCacheResponse(num_blocks=num_blocks, num_executors=len(replicas))

    # -- recording ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Records from now on."""
        if not self._is_recording:
            self._is_recording = True
            for replica in self._scheduler.replicas:
                if replica.info is not None:
                    self._record(replica.replica_id, replica.info, replica.kv)

    def on_memory(self, replica_id: int, info: ExecutorInfo | None, kv: KVCacheManager) -> None:
        """Takes in that a replica has new memory, which is empty; None: it has no executor."""
        if self._is_recording:
            if (lost := self._recorders.pop(replica_id, None)) is not None:
                lost.clear()
            if info is not None:
                self._record(replica_id, info, kv).clear()  # so that subscribers know the executor

    def _record(self, replica_id: int, info: ExecutorInfo, kv: KVCacheManager) -> Recorder:
        replicas = self._scheduler.replicas
        name = next((replica.name for replica in replicas if replica.replica_id == replica_id), "")
        driver = self._drivers.get(replica_id)
        executor = KvEventsExecutor(
            name=name,
            address=driver.address if driver else "",
            incarnation=info.incarnation,
            weights_version=info.weights.version,
        )
        self._recorders[replica_id] = Recorder(executor, kv, self._scheduler.requests(), self._on_change)
        return self._recorders[replica_id]

    def _on_change(self, recorder: Recorder) -> None:
        if not self._changed:
            self._call_soon(self.flush)
        self._changed[recorder] = None

    def flush(self) -> None:
        """Makes messages of all changes so far."""
        changed, self._changed = self._changed, {}
        for recorder in changed:
            changes = recorder.take()
            metrics.count(changes)
            self.journal.append(message_of(recorder, changes, self._name_of))

    def _name_of(self, digest: str) -> str:
        listed = self._adapters.listed if self._adapters is not None else ()
        return next((adapter.name for adapter in listed if adapter.digest == digest), "")

    # -- subscribers -------------------------------------------------------------------------------------------------

    async def subscribe(self, request: SubscribeKvEventsRequest) -> AsyncGenerator[SubscribeKvEventsResponse]:
        """Yields a snapshot and what changes after it, or what changes after the position in the request.

        Raises RpcError RESOURCE_EXHAUSTED for a subscriber that falls behind.
        """
        self.start()
        self.flush()
        journal = self.journal
        last = next((one.number for one in request.after if one.source == journal.source), -1)
        with metrics.SUBSCRIBERS.track_inprogress():
            if not journal.follows(last):
                last = journal.last
                for part in snapshot(self._recorders.values(), self._name_of):
                    part.source, part.number = journal.source, last
                    yield part
            while True:
                while last < journal.last:
                    if not journal.follows(last):
                        metrics.DROPPED.inc()
                        raise RpcError(
                            grpc.StatusCode.RESOURCE_EXHAUSTED,
                            f"the messages after {last} were not read in time and are gone; subscribe again",
                        )
                    last += 1
                    yield journal.get(last)
                await journal.wait()
