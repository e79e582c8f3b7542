"""Blocks on their way from the replica that computes a prompt to the one that will decode.

While later chunks of a prompt run, the blocks of earlier ones are loaded by the replica that is going to decode, which
holds them until the request runs there. Nothing depends on it: what is not loaded early is loaded at the request's
turn, and what cannot be loaded is computed. Pure.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.tiers.holding import Holding
from pagewire.services.scheduler.tiers.replica_tiers import ReplicaTiers
from pagewire.services.scheduler.tiers.source import Source
from pagewire.services.scheduler.values.request import Request, RequestStatus


@dataclass(slots=True)
class _Transfer:
    """The early loads of one request."""

    target: Replica
    tiers: ReplicaTiers  # of its present executor
    holding: Holding


# Blocks of running prompts that a step completes: request, its epoch, number of its leading blocks.
_Chunks = list[tuple[Request, int, int]]


class Tiers(Protocol):
    """The tiers of all executors."""

    of_replica: dict[int, ReplicaTiers]  # by replica id

    def let_load(self, replica: Replica) -> None:
        """Lets a replica without tiers of its own load from others."""

    def address_of(self, replica: Replica) -> str:
        """Returns the address at which other executors reach the replica's."""


class Transfers:
    """Begins loads at the replicas that decode, and lets go of what they hold in vain."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._replicas: Sequence[Replica] = ()
        self._of_request: dict[Request, _Transfer] = {}
        self._chunks: dict[Replica, deque[_Chunks]] = {}  # of the steps in flight
        self.wanted: set[Replica] = set()  # have a reason to decide

    def follow(self, replicas: Iterable[Replica]) -> None:
        """Lets the executors of these replicas load from each other."""
        self._replicas = tuple(replicas)
        for replica in self._replicas:
            self._tiers.let_load(replica)
            if (tiers := self._tiers_of(replica)) is not None:
                tiers.others = partial(self._sources, replica)
        self._chunks = {one: chunks for one, chunks in self._chunks.items() if one in self._replicas}
        for request in [one for one, transfer in self._of_request.items() if transfer.target not in self._replicas]:
            self._release(request)

    def _sources(self, reader: Replica) -> list[Source]:
        return [
            Source(self._tiers.address_of(one), tiers.contents)
            for one in self._replicas
            if one is not reader and _can_read(reader, one) and (tiers := self._tiers_of(one)) is not None
        ]

    def _tiers_of(self, replica: Replica) -> ReplicaTiers | None:
        return self._tiers.of_replica.get(replica.replica_id)

    # -- steps -------------------------------------------------------------------------------------------------------

    def on_step(self, replica: Replica) -> None:
        """Takes in that a replica that computes prompts has sent a step."""
        chunks = [(one, one.epoch, one.blocks.num_cached) for one in replica.running if one.blocks.num_cached]
        self._chunks.setdefault(replica, deque()).append(chunks)

    def on_result(self, replica: Replica, choose: Callable[[Request], Replica | None]) -> None:
        """Takes in that the oldest step of a replica was answered. choose: finds the replica that would decode."""
        steps = self._chunks.get(replica)
        for request, epoch, num_blocks in steps.popleft() if steps else ():
            if request.epoch != epoch or request.num_prompt_tokens + 1 >= request.max_num_tokens:
                continue
            # What windows and states need of a prompt is known at its end.
            if request.num_output_tokens or _keeps_all(replica):
                self._extend(request, num_blocks, choose)

    def on_leaving(self, replica: Replica, request: Request) -> None:
        """Takes in that a request leaves the replica that has computed its prompt."""
        if request.images.images and (tiers := self._tiers_of(replica)) is not None:
            # Its blocks may have become findable with this result, and are saved with the next step.
            replica.kv.cache_blocks(request)
            tiers.promise_saves()

    def _extend(self, request: Request, num_blocks: int, choose: Callable[[Request], Replica | None]) -> None:
        """Begins to load a request's first `num_blocks` blocks where it is going to decode."""
        transfer = self._of_request.get(request)
        if transfer is not None and self._is_void(transfer, request):
            del self._of_request[request]
            transfer.holding.release()
            transfer = None
        if transfer is None and (transfer := self._begin(request, choose)) is None:
            return
        if transfer.holding.extend(num_blocks):
            self._of_request[request] = transfer
            self.wanted.add(transfer.target)

    def _begin(self, request: Request, choose: Callable[[Request], Replica | None]) -> _Transfer | None:
        target = choose(request)
        tiers = None if target is None else self._tiers_of(target)
        if target is None or tiers is None:
            return None
        return _Transfer(target, tiers, tiers.hold(request))

    def _is_void(self, transfer: _Transfer, request: Request) -> bool:
        """Returns whether a transfer serves no purpose any more: its target has another executor, or the request runs
        there, or decodes elsewhere, or has ended."""
        if request.is_finished or self._tiers_of(transfer.target) is not transfer.tiers:
            return True
        return request.status is RequestStatus.RUNNING and (
            request.replica_id == transfer.target.replica_id or request.num_output_tokens > 0
        )

    # -- what is held in vain ----------------------------------------------------------------------------------------

    def before_decision(self, replica: Replica) -> None:
        """Releases what a replica holds in vain and, when running requests are about to need the blocks, the rest, the
        latest first."""
        if not self._of_request:
            return
        own = [(request, one) for request, one in self._of_request.items() if one.target is replica]
        for request, transfer in own:
            if self._is_void(transfer, request):
                self._release(request)
        for request, _ in reversed(own):
            if replica.kv.has_free_blocks(1 + len(replica.running)):
                break
            self._release(request)

    def release_all(self, replica: Replica) -> None:
        """Releases all that an idle replica holds, for which a request that waits has no room."""
        own = [request for request, one in self._of_request.items() if one.target is replica]
        for request in own:
            self._release(request)
        if own:
            self.wanted.add(replica)

    def _release(self, request: Request) -> None:
        if (transfer := self._of_request.pop(request, None)) is not None:
            transfer.holding.release()


def _can_read(reader: Replica, source: Replica) -> bool:
    """Returns whether an executor has tiers with blocks of the format that another one reads."""
    if reader.info is None or source.info is None:
        return False
    return bool(source.info.kv_tiers) and reader.info.kv_format == source.info.kv_format != ""


def _keeps_all(replica: Replica) -> bool:
    return replica.info is not None and all(group.keeps_all for group in replica.info.kv_groups)
