"""The tiers of the ranks: the leader tells the others which blocks they keep, and learns what they have loaded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from pagewire.process.priority import step_back
from pagewire.services.executor.parallel.group import RankLost
from pagewire.services.executor.ranks.leader import Leader
from pagewire.services.executor.ranks.link import Link
from pagewire.services.executor.step.step import Step
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.joined import JoinedLoads, format_of_rank
from pagewire.services.executor.tiers.loads import LOAD_S, Load, Loaded
from pagewire.services.executor.tiers.messages import blocks_of, keys_of, loaded_from_proto, loaded_to_proto, with_moves
from pagewire.services.executor.tiers.runner import TieredRunner
from pagewire.v1.executor_pb2 import BlockHashes, ForgetBlocksRequest, KVLoaded, StepRequest
from pagewire.v1.rank_link_pb2 import RankCommand, RankReport
from pagewire.wire.rpc import RpcError

_FORGET_S = 8.0  # the scheduler waits a little longer
_LAST_WRITES_S = 2.0  # the leader waits a little longer


class LeadersShards:
    """The `OtherRanks` of a leader."""

    def __init__(self, leader: Leader, num_ranks: int) -> None:
        self._leader, self.num_ranks = leader, num_ranks
        self.loads = JoinedLoads(num_ranks)
        leader.on_loaded = self._on_loaded

    def _on_loaded(self, message: KVLoaded) -> None:
        self.loads.on_loaded(loaded_from_proto(message))

    def open(self, kv_format: str) -> None:
        with contextlib.suppress(RankLost):  # the device thread notices
            self._leader.send(RankCommand(open_tiers=kv_format))

    def forget(self, blocks: Sequence[BlockHashes]) -> None:
        try:
            have_all = self._leader.forget(ForgetBlocksRequest(blocks=blocks), _FORGET_S)
        except RankLost as error:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        if not have_all:
            message = f"not all ranks could forget these blocks within {_FORGET_S:g} s; see their log, and try again"
            raise RpcError(grpc.StatusCode.UNAVAILABLE, message)


class FollowersShards:
    """The tiers of a follower. Used on the device thread, except where it is said."""

    def __init__(self, runner: TieredRunner, link: Link, rank: int, num_ranks: int, loop: asyncio.AbstractEventLoop):
        """loop: of the process; it ends loads in time."""
        self._tiers, self._link, self._loop = runner.tiers, link, loop
        self._rank, self._num_ranks = rank, num_ranks
        self._num_blocks = [group.num_blocks for group in runner.kv_groups]
        self._forgetting = ThreadPoolExecutor(1, "kv-forget", initializer=step_back)  # waits for the disk

    def open(self, kv_format: str) -> None:
        self._tiers.open(format_of_rank(kv_format, self._rank, self._num_ranks))

    def attach(self, step: Step, message: StepRequest) -> Step:
        """Returns the step with the blocks that its message saves and loads."""
        if not message.saves and not message.loads:
            return step
        loads = [
            Load(load.load_id, blocks_of(load.blocks, self._num_blocks), self._report, load.source)
            for load in message.loads
        ]
        for load in loads:
            self._loop.call_soon_threadsafe(self._loop.call_later, LOAD_S, self._tiers.loads.give_up, load)
        return with_moves(step, blocks_of(message.saves, self._num_blocks), loads)

    def _report(self, loaded: Loaded) -> None:
        """Called on any thread."""
        with contextlib.suppress(OSError):  # the leader has ended, and so does this process
            self._link.send(RankReport(loaded=loaded_to_proto(loaded)))

    def forget(self, request: ForgetBlocksRequest) -> None:
        """Forgets blocks, none: all, and reports it then."""
        keys = [key for one in request.blocks for key in keys_of(one.group, one.hashes)]
        self._forgetting.submit(self._forget, keys)

    def _forget(self, keys: Sequence[Key]) -> None:
        try:
            self._tiers.forget(keys)
            has_forgotten = True
        except OSError:  # it was logged
            has_forgotten = False
        with contextlib.suppress(OSError):
            self._link.send(RankReport(has_forgotten=has_forgotten))

    def close(self) -> None:
        self._tiers.close(_LAST_WRITES_S)
