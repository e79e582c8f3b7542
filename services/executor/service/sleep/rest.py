"""The sleep of the model of one rank: its memory goes, and comes back. All calls come from the device thread."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor import stats
from pagewire.services.executor.adapters.host import HostAdapters
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.loading.served_model import DUMMY, ServedModel, load_served
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.parallel.group import ALONE_GROUP, Group
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service.sleep.host_copy import HostCopy
from pagewire.services.executor.service.sleep.resting_runner import RestingRunner
from pagewire.services.executor.start.before import Before
from pagewire.services.executor.start.startup import start_runner

logger = logging.getLogger(__name__)

# Starts a runner with this configuration, on the device thread.
Start = Callable[[ExecutorConfig, Before], tuple[ModelRunner, ExecutorInfo]]


def start_again(
    model_path: str, group: Group, config: ExecutorConfig, before: Before
) -> tuple[ModelRunner, ExecutorInfo]:
    """Starts a runner as one in this process was started before."""
    return start_runner(config, model_path, lambda fraction, text: None, group, before)


class NoRoom(Exception):
    """There is no host memory for the weights, here or on another rank: the model stays awake."""


class Rest:
    """The model of this rank, whether it sleeps or is awake. All ranks of the group make the same calls."""

    def __init__(
        self, config: ExecutorConfig, model_path: Path, info: ExecutorInfo, start: Start, group: Group = ALONE_GROUP
    ) -> None:
        """model_path: of the model's files. info: of the first start."""
        self._config, self._path, self._start, self._group = config, model_path, start, group
        self.info = info  # of the last start
        self._level = 0
        self._served: ServedModel | None = None  # with weights in `_copy`
        self._copy: HostCopy | None = None
        self._adapters: HostAdapters | None = None  # which were read

    @property
    def keeps_weights(self) -> bool:
        """True while weights of a model that sleeps are in host memory."""
        return self._copy is not None

    def adapters_of(self, resting: RestingRunner) -> HostAdapters:
        """Returns the adapters in memory, also while the model sleeps."""
        if self._level and self._adapters is not None:
            return self._adapters
        assert isinstance(resting.adapters, AdapterSlots)
        return resting.adapters.host

    def leave(self, resting: RestingRunner, level: int) -> None:
        """Gives the model's memory back; of one that sleeps, what a higher level drops. Raises NoRoom, or RankLost."""
        if self._level:
            if level > self._level:
                self._level, self._served, self._copy = level, None, None
            return
        runner = resting.rest()
        device, is_own = runner.device, isinstance(runner.model, OwnModel)
        on_cuda = device.type == "cuda"
        if on_cuda and level == 1:
            try:
                self._copy = self._copied(runner)
            except NoRoom:
                resting.resume(runner)
                raise
            self._served = ServedModel(runner.model, runner.pooling, self.info.weights_digest)
            self._copy.release()
        self._level = level
        if isinstance(runner.adapters, AdapterSlots):
            self._adapters = runner.adapters.host
        _let_go(runner)
        del runner
        if on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
        elif level == 1 and is_own and self._config.load_format != DUMMY:
            self._keep_packed(device)

    def _copied(self, runner: ModelRunner) -> HostCopy:
        """Copies the weights to host memory, on all ranks or on none. Raises NoRoom."""
        copy, error = None, ""
        try:
            copy = HostCopy((runner.model, runner.pooling), runner.device, runner.kv_caches)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as raised:
            error = str(raised)
        if not self._group.all_have(copy is not None) or copy is None:
            raise NoRoom(error or "another rank has none")
        return copy

    def come_back(self, resting: RestingRunner) -> None:
        """Makes the model ready for steps. Raises what a start raises: it sleeps on, but other ranks may be awake."""
        config = self._packing_config() if self._level == 1 else self._config
        try:
            if self._copy is not None:
                self._copy.restore()
            runner, self.info = self._start(config, Before(self.info, self._served))
        except Exception:
            if self._copy is not None:
                self._copy.release()
            raise
        self._level, self._served, self._copy = 0, None, None
        if self._adapters is not None and isinstance(runner.adapters, AdapterSlots):
            runner.adapters.host = self._adapters
        resting.resume(runner)

    def _keep_packed(self, device: torch.device) -> None:
        """Writes the packed weights to disk unless they are there."""
        config, group = self._packing_config(), self._group
        try:
            load_served(config, self._path, device, config.load_format, tensor=group.tensor, stage=group.stage)
        except (StartupError, OSError) as error:
            logger.warning("the packed weights could not be kept on disk, so the model may not wake: %s", error)

    def _packing_config(self) -> ExecutorConfig:
        """Returns the configuration with a cache of packed weights."""
        return replace(self._config, weights_cache=self._config.weights_cache or "auto")


def _let_go(runner: ModelRunner) -> None:
    """Takes leave of all that refers to the runner's memory, or is going to write to it."""
    runner.stage.leave()
    if isinstance(runner.adapters, AdapterSlots):
        runner.adapters.leave()
    if runner.device.type == "cuda":
        for cache in runner.kv_caches:  # layers of a model that is kept still refer to it
            cache.untyped_storage().resize_(0)
    stats.WEIGHT_BYTES.set(0)
    stats.KV_CACHE_BYTES.set(0)
    stats.KV_CACHE_RESIDENT_BYTES.set_function(lambda: 0)
