"""The start of a leader: from a configuration to a runner that all ranks follow."""

from __future__ import annotations

import dataclasses
import threading

from pagewire.config import ExecutorConfig
from pagewire.services.executor.adapters.host import HostAdapter
from pagewire.services.executor.adapters.loading import load_adapter
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.ranks.ahead import Ahead
from pagewire.services.executor.ranks.leader import Leader
from pagewire.services.executor.ranks.leading_runner import LeadingRunner
from pagewire.services.executor.ranks.shards import LeadersShards
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.service.replacement import LoadedWeights, load_weights
from pagewire.services.executor.service.work import NO_OBSERVER, WorkObserver
from pagewire.services.executor.tiers.start import start_tiered
from pagewire.v1.common_pb2 import Adapter
from pagewire.v1.executor_pb2 import Weights
from pagewire.v1.rank_link_pb2 import RankCommand


class LeadersStart:
    """The functions of an executor with several ranks that `Worker` and `Replacements` call."""

    def __init__(self, config: ExecutorConfig, leader: Leader) -> None:
        self._config, self._leader = config, leader
        self.group = Group()
        self._reading = threading.Lock()  # all ranks read the same, one thing after the other
        self.shards = LeadersShards(leader, config.num_ranks)
        self.observer: WorkObserver = Ahead(leader) if config.pipeline_parallel_size > 1 else NO_OBSERVER

    def runner(self, model_path: str, progress: Progress) -> tuple[Runner, ExecutorInfo]:
        """Starts the runner as `start_tiered` does, on all ranks."""
        self.group = self._leader.gather()
        try:
            runner, info = start_tiered(self._config, model_path, progress, self.group)
        except Exception:
            self._leader.check_start()  # another rank may be the cause
            raise
        self._leader.wait_ready()
        return LeadingRunner(runner, self._leader, self.group, sends=self.observer is NO_OBSERVER), info

    def weights(self, runner: Runner, wanted: Weights) -> LoadedWeights:
        """Loads weights as `load_weights` does, on all ranks."""
        with self._reading:
            self._leader.load(wanted)
            loaded = load_weights(self._config, runner, wanted, self.group)
        return dataclasses.replace(loaded, others=self._leader)

    def adapter(self, slots: AdapterSlots, wanted: Adapter) -> HostAdapter:
        """Loads an adapter as `load_adapter` does, on all ranks."""
        with self._reading:
            self._leader.load_adapter(wanted)
            return load_adapter(slots, wanted, self.group)

    def drop_adapter(self, digest: str) -> None:
        """Lets the other ranks forget an adapter that no step holds any more."""
        self._leader.drop_adapter(digest)

    def sleep(self, level: int) -> None:
        """Puts the other ranks to sleep. Called on the device thread; raises RankLost."""
        self._leader.send(RankCommand(sleep=level))

    def wake(self) -> None:
        """Wakes the other ranks. Called on the device thread; raises RankLost."""
        self._leader.send(RankCommand(wake=True))
