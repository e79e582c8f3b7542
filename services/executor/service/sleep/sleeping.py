"""Puts the model to sleep and wakes it. Sleep ends the stream of steps; a wake is a start in the same process.

Level 1 keeps the weights: on CUDA in host memory, from where the wake copies them; on a CPU packed on disk
(`weights.cache`), from where it maps them. After level 2, the wake reads the checkpoint.

The sizes that the first start found stay in force, so that the executor remains interchangeable with others.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import torch

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.process.process import release_unused_memory
from pagewire.services.executor import stats
from pagewire.services.executor.adapters.serving import ServedAdapters
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.loading.served_model import DUMMY, ServedModel, load_served
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.service.convert import first_weights
from pagewire.services.executor.service.replacement import Replacements
from pagewire.services.executor.service.sleep.host_copy import HostCopy
from pagewire.services.executor.service.sleep.resting_runner import RestingRunner, Wrapper, asleep
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.start.before import Before
from pagewire.services.executor.start.startup import start_runner
from pagewire.v1.executor_pb2 import SleepState
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

LEVELS = (1, 2)

# Starts a runner with this configuration, on the device thread.
Start = Callable[[ExecutorConfig, Before], tuple[Runner, ExecutorInfo]]


def start_again(config: ExecutorConfig, model_path: str, before: Before) -> tuple[Runner, ExecutorInfo]:
    """Starts a runner as one in this process was started before."""
    return start_runner(config, model_path, lambda fraction, text: None, before=before)


class Sleeping:
    """The sleep of an executor's model. All calls come from the event loop."""

    def __init__(
        self,
        worker: Worker,
        config: ExecutorConfig,
        model_path: Path,
        start: Start,
        weights: Replacements,
        adapters: ServedAdapters,
    ) -> None:
        """worker: its runner is a `RestingRunner`, else the executor cannot sleep. model_path: of the model's files."""
        self._worker, self._config, self._path, self._start = worker, config, model_path, start
        self._weights, self._adapters = weights, adapters
        self._info = worker.loaded.result()
        self._device: torch.device | None = None  # while it sleeps
        self._served: ServedModel | None = None  # with weights in `_copy`
        self._copy: HostCopy | None = None
        self._wrapper: Wrapper | None = None  # around the model's runner
        self._lock = asyncio.Lock()
        self.state = SleepState()

    def check(self) -> None:
        if self.state.level:
            raise asleep()

    def close(self) -> None:
        pass

    async def fall_asleep(self, wanted: SleepState) -> float:
        if wanted.level not in LEVELS:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"there is no sleep of level {wanted.level}; use 1 or 2")
        if not isinstance(self._worker.runner, RestingRunner):
            raise RpcError(
                grpc.StatusCode.UNIMPLEMENTED,
                "an executor of several ranks (--tensor-parallel-size, --pipeline-parallel-size) cannot sleep",
            )
        # The caller may disconnect meanwhile.
        return await asyncio.shield(asyncio.create_task(self._fall_asleep(wanted, self._worker.runner)))

    async def wake(self) -> float:
        return await asyncio.shield(asyncio.create_task(self._wake()))

    async def _fall_asleep(self, wanted: SleepState, resting: RestingRunner) -> float:
        async with self._lock:
            started = time.perf_counter()
            if self.state.level:
                self._go_deeper(wanted)
                return 0.0
            await self._adapters.on_sleep()
            self._weights.on_sleep()
            self.state.CopyFrom(wanted)  # from now on, no stream can be opened
            failures: list[Exception] = []
            leaving = self._worker.between_steps(
                lambda _: self._leave(resting, wanted.level, failures), "its model falls asleep", within=None
            )
            await asyncio.wrap_future(leaving)
            if failures:
                self.state.Clear()
                raise RpcError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"there is no host memory for the weights, so the model stays awake: {failures[0]}; use level 2",
                ) from failures[0]
            await asyncio.to_thread(_give_back)
            seconds = time.perf_counter() - started
            logger.info("the model sleeps, level %d, after %.2f s", wanted.level, seconds)
            return seconds

    def _go_deeper(self, wanted: SleepState) -> None:
        """Takes in another wish for a model that sleeps already."""
        if wanted.level > self.state.level:
            self._served, self._copy = None, None
        self.state.level = max(wanted.level, self.state.level)
        self.state.wakes_on_request = wanted.wakes_on_request

    async def _wake(self) -> float:
        async with self._lock:
            if not self.state.level:
                return 0.0
            started = time.perf_counter()
            resting = self._worker.runner
            assert isinstance(resting, RestingRunner)
            failures: list[Exception] = []
            was_kept = self._copy is not None
            await asyncio.wrap_future(
                self._worker.between_steps(lambda _: self._return(resting, failures), "its model wakes", within=None)
            )
            if failures:
                await asyncio.to_thread(_give_back)
                logger.error("the model cannot be woken: %s", failures[0])
                raise RpcError(
                    grpc.StatusCode.FAILED_PRECONDITION, f"the model cannot be woken: {failures[0]}"
                ) from failures[0]
            if not was_kept:
                self._weights.on_wake(first_weights(self._info, self._config.revision or ""))
            self._adapters.on_wake(resting.adapters)
            self.state.Clear()
            seconds = time.perf_counter() - started
            logger.info("the model is awake after %.2f s", seconds)
            return seconds

    # -- on the device thread ----------------------------------------------------------------------------------------

    def _leave(self, resting: RestingRunner, level: int, failures: list[Exception]) -> None:
        runner = resting.present
        self._wrapper = runner if isinstance(runner, Wrapper) else None
        if self._wrapper is not None:
            runner = self._wrapper.rest()
        assert isinstance(runner, ModelRunner)
        on_cuda, is_own = runner.device.type == "cuda", isinstance(runner.model, OwnModel)
        if on_cuda and level == 1:
            try:
                self._copy = HostCopy((runner.model, runner.pooling), runner.device, runner.kv_caches)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                failures.append(error)
                resting.replace(runner if self._wrapper is None else self._wrapper.resume(runner))
                return
            self._served = ServedModel(runner.model, runner.pooling, self._info.weights_digest)
            self._copy.release()
        if isinstance(runner.adapters, AdapterSlots):
            runner.adapters.leave()
        if on_cuda:
            for cache in runner.kv_caches:  # layers of a model that is kept still refer to it
                cache.untyped_storage().resize_(0)
        stats.WEIGHT_BYTES.set(0)
        stats.KV_CACHE_BYTES.set(0)
        stats.KV_CACHE_RESIDENT_BYTES.set_function(lambda: 0)
        resting.replace(None)
        device = runner.device
        del runner
        if on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
        elif level == 1 and is_own and self._config.load_format != DUMMY:
            _keep_packed(self._packing_config(), self._path, device)

    def _return(self, resting: RestingRunner, failures: list[Exception]) -> None:
        config = self._packing_config() if self.state.level == 1 else self._config
        try:
            if self._copy is not None:
                self._copy.restore()
            runner, self._info = self._start(config, Before(self._info, self._served))
        except Exception as error:
            failures.append(error)
            if self._copy is not None:
                self._copy.release()
            return
        self._served, self._copy = None, None
        resting.replace(runner if self._wrapper is None else self._wrapper.resume(runner))

    def _packing_config(self) -> ExecutorConfig:
        """Returns the configuration with a cache of packed weights."""
        return replace(self._config, weights_cache=self._config.weights_cache or "auto")


def _keep_packed(config: ExecutorConfig, path: Path, device: torch.device) -> None:
    """Writes the packed weights to disk unless they are there."""
    try:
        load_served(config, path, device, config.load_format)
    except (StartupError, OSError) as error:
        logger.warning("the packed weights could not be kept on disk, so the model may not wake: %s", error)


def _give_back() -> None:
    gc.collect()
    release_unused_memory()
