"""The tiers of all executors: gives the memory of each the decisions about its tiers, and makes the calls."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import grpc

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.memory.block_index import BlockListener
from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.service.live_request import LiveRequest
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.tiers.calls import TierCalls
from pagewire.services.scheduler.tiers.contents import TierContents
from pagewire.services.scheduler.tiers.replica_tiers import ReplicaTiers
from pagewire.services.scheduler.tiers.resets import Resets
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.executor_pb2 import BlockHashes
from pagewire.wire.rpc import RpcError

# Executors end each load in less.
_LONGEST_WAIT_S = 60.0
# Prompts wait at most as long for a new executor to say what its tiers hold.
_KNOWN_S = 0.5


class Calls(Protocol):
    """The calls to one executor; see `TierCalls`."""

    def watch(self, contents: TierContents) -> None: ...

    def forget(
        self, blocks: Sequence[BlockHashes] | None, on_forgotten: Callable[[], None], reset_at: int = 0
    ) -> "asyncio.Future[str] | None": ...

    def stop(self) -> None: ...


# Returns the calls to the executor of a replica, by its id; None: nothing is called.
MakeCalls = Callable[[int], Calls | None]


class Tiers:
    """Joins the memory of each replica to the tiers of its executor."""

    def __init__(self, make_calls: MakeCalls | None = None) -> None:
        """make_calls: by default, calls over the channel of the replica's driver."""
        self._make_calls = make_calls or self._connect
        self._calls: dict[int, Calls] = {}  # by replica id
        self._forgetting: list[tuple[int, asyncio.Future[str]]] = []
        # What executors have yet to forget, by replica id; None: all. A lost connection does not change it.
        self._unforgotten: dict[int, list[Sequence[BlockHashes] | None]] = {}
        self._resets = Resets()
        self.of_replica: dict[int, ReplicaTiers] = {}  # by replica id; only those of executors with tiers
        self._drivers: Mapping[int, ReplicaDriver] = {}
        self._live: Mapping[int, LiveRequest] = {}
        self._scheduler: Scheduler | None = None
        self.index_of: Callable[[int], BlockListener] | None = None  # for placement: of a replica, by its id

    def follow(
        self,
        scheduler: Scheduler,
        drivers: Mapping[int, ReplicaDriver] | None = None,
        live: Mapping[int, LiveRequest] | None = None,
    ) -> None:
        """Takes in the scheduler that has the replicas. drivers: by replica id. live: requests by id. Call this before
        it has executors."""
        self._scheduler = scheduler
        self._live = {} if live is None else live
        self._drivers = {} if drivers is None else drivers

    def on_memory(self, replica_id: int, info: ExecutorInfo | None, kv: KVCacheManager) -> None:
        """Takes in that a replica has new memory, which is empty; None: it has no executor."""
        if (lost := self.of_replica.pop(replica_id, None)) is not None:
            lost.contents.clear()
            lost.leave()
        if (calls := self._calls.pop(replica_id, None)) is not None:
            calls.stop()
        if info is not None and info.kv_tiers and kv.caches_prefixes:
            if self._resets.on_executor(replica_id, info.reset_at):
                self._reset_others(replica_id)
            if self._resets.has_missed(replica_id):
                self._unforgotten[replica_id] = [None]
            self._join(replica_id, info, kv, self._make_calls(replica_id))

    def _reset_others(self, replica_id: int) -> None:
        """Makes executors forget what they have kept through a reset that one of them knows of, from an earlier
        scheduler."""
        for other, tiers in self.of_replica.items():
            if other != replica_id and self._resets.has_missed(other):
                tiers.clear()

    def let_load(self, replica: Replica) -> None:
        """Lets a replica without tiers of its own load from others."""
        if replica.info is not None and replica.replica_id not in self.of_replica and replica.kv.caches_prefixes:
            self._join(replica.replica_id, replica.info, replica.kv, None)

    def _join(self, replica_id: int, info: ExecutorInfo, kv: KVCacheManager, calls: Calls | None) -> None:
        index = self.index_of(replica_id) if self.index_of is not None else None
        indexed_group = next((i for i, group in enumerate(kv.groups) if not group.window), 0)
        contents = TierContents([tier.kind for tier in info.kv_tiers], len(kv.groups), index, indexed_group)

        def compute_seconds(start: int, num_tokens: int) -> float:
            return self._compute_seconds(replica_id, start, num_tokens)

        def forget(blocks: Sequence[BlockHashes] | None, on_forgotten: Callable[[], None]) -> None:
            if calls is None:
                on_forgotten()
            else:
                self._forget(replica_id, calls, blocks, on_forgotten)

        def call_later(seconds: float, function: Callable[[], None]) -> None:
            if driver is not None and seconds < _LONGEST_WAIT_S:
                loop = asyncio.get_running_loop()
                loop.call_later(seconds, function)
                loop.call_later(seconds, driver.wake)

        driver = self._drivers.get(replica_id)
        if driver is None or calls is None:
            contents.known()
        tiers = ReplicaTiers(replica_id, info, kv, contents, compute_seconds, forget, call_later, self._on_wait)
        kv.tiers = self.of_replica[replica_id] = tiers
        if calls is not None:
            self._calls[replica_id] = calls
            if driver is not None:
                contents.on_known = driver.wake
                call_later(_KNOWN_S, contents.known)
            self._watch(replica_id, calls, contents)

    def _on_wait(self, request: Request, begins: bool) -> None:
        if (live := self._live.get(request.request_id)) is not None:
            live.timeline.on_load(time.monotonic(), request.num_output_tokens, begins=begins)

    def _watch(self, replica_id: int, calls: Calls, contents: TierContents) -> None:
        """Keeps contents up to date, once the executor has forgotten what it did not while it was away."""
        waiting = self._unforgotten.pop(replica_id, [])
        left = len(waiting)

        def on_forgotten() -> None:
            nonlocal left
            left -= 1
            if not left:
                calls.watch(contents)

        for blocks in waiting:
            self._forget(replica_id, calls, blocks, on_forgotten)
        if not waiting:
            calls.watch(contents)

    def _forget(
        self, replica_id: int, calls: Calls, blocks: Sequence[BlockHashes] | None, on_forgotten: Callable[[], None]
    ) -> None:
        unforgotten = self._unforgotten.setdefault(replica_id, [])
        unforgotten.append(blocks)
        reset_at = self._resets.latest if blocks is None else 0

        def end() -> None:
            unforgotten.remove(blocks)
            self._resets.on_followed(replica_id, reset_at)
            on_forgotten()

        if (first := calls.forget(blocks, end, reset_at)) is not None:
            self._forgetting = [one for one in self._forgetting if not one[1].done()]
            self._forgetting.append((replica_id, first))

    def _connect(self, replica_id: int) -> Calls | None:
        driver = self._drivers.get(replica_id)
        return TierCalls(driver.channel, driver.address) if driver is not None else None

    def _compute_seconds(self, replica_id: int, start: int, num_tokens: int) -> float:
        """Returns the seconds by which computing tokens of a prompt, from position `start` on, delays all requests of
        a replica, its own included; infinite if unknown, or if it is to compute none."""
        replica = self._replica(replica_id)
        if replica is None or not replica.costs.are_known or (replica.info and replica.info.role == "decode"):
            return float("inf")
        num_decodes = sum(not request.is_prefilling for request in replica.running)
        costs = replica.costs
        prompt = costs.prompt_seconds(start, num_tokens)
        num_steps = num_tokens / replica.prompt_room(num_decodes, 1, num_tokens)
        step = costs.first_prompt_seconds + costs.decode_seconds(num_decodes)
        return prompt + num_steps * step + num_decodes * prompt

    def address_of(self, replica: Replica) -> str:
        """Returns the address at which other executors read from this replica's, as the scheduler reaches it."""
        driver = self._drivers.get(replica.replica_id)
        return replica.name if driver is None else driver.address

    def _replica(self, replica_id: int) -> Replica | None:
        replicas = self._scheduler.replicas if self._scheduler is not None else ()
        return next((one for one in replicas if one.replica_id == replica_id), None)

    def load_seconds(self, replica_id: int, hashes: Sequence[bytes]) -> float:
        """Returns the expected seconds of a load of these blocks that begins now on a replica."""
        tiers = self.of_replica.get(replica_id)
        return tiers.expected_seconds(hashes) if tiers is not None else float("inf")

    def begin_reset(self) -> None:
        """Takes in that the memory of all executors is about to be reset."""
        self._resets.begin()

    async def on_reset(self) -> None:
        """Takes in that the memory of all executors was reset; returns when their tiers have forgotten what they held.
        Those that are away forget it before anything is loaded there. Raises RpcError UNAVAILABLE if one has not, or if
        none that stays could be told."""
        waiting, self._forgetting = self._forgetting, []
        for replica_id, first in waiting:
            if reason := await first:
                raise RpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"the executor at {self._name(replica_id)} has not forgotten what its tiers hold ({reason}); "
                    "nothing is loaded there until it has, so try again once it answers",
                )
        away = self._drivers.keys() - self._calls.keys()
        for replica_id in away:
            self._unforgotten[replica_id] = [None]
        known = self._resets.known & self._drivers.keys()
        missed = [replica_id for replica_id in away & known if not await self._reset_away(replica_id)]
        if missed and len(missed) == len(known):
            raise RpcError(
                grpc.StatusCode.UNAVAILABLE,
                f"the executor at {self._name(missed[0])} is away: it forgets what its tiers hold when it is back, "
                "unless the scheduler restarts before; try again then",
            )

    async def _reset_away(self, replica_id: int) -> bool:
        """Makes the tiers of an executor that takes no steps forget everything, as it may sleep; returns whether they
        have."""
        if (calls := self._make_calls(replica_id)) is None:
            return False
        reset_at = self._resets.latest
        first = calls.forget(None, lambda: self._resets.on_followed(replica_id, reset_at), reset_at)
        has_failed = first is None or bool(await first)
        calls.stop()
        return not has_failed

    def _name(self, replica_id: int) -> str:
        driver = self._drivers.get(replica_id)
        return driver.address if driver else str(replica_id)
