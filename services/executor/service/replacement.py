"""Replacement of the model's weights: new ones are read while the old ones serve, and copied over them between steps.

Everything may fail except the last part, a copy within memory: so the old weights remain in use if anything is wrong
with a checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import torch

from pagewire.config import ExecutorConfig
from pagewire.config.values.offload import of_replaced_offload
from pagewire.errors import StartupError
from pagewire.files.models import resolve_model
from pagewire.process.priority import step_back
from pagewire.process.process import release_unused_memory
from pagewire.services.executor import stats
from pagewire.services.executor.device import memory
from pagewire.services.executor.loading.served_model import DUMMY, ServedModel, digest_of, load_served
from pagewire.services.executor.loading.twins import Differs, Pairs, twins
from pagewire.services.executor.parallel.group import ALONE_GROUP, Group
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.pipeline.trial_stage import trial_stage
from pagewire.services.executor.runner.probe import BrokenModel, probe
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.service.worker import Worker
from pagewire.v1.executor_pb2 import Weights
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

_CHECKED_FOR_NAN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoadedWeights:
    """Weights that are ready to be put in force."""

    weights: Weights
    pairs: Pairs
    others: Others | None = None  # with the same weights loaded

    def install(self, runner: Runner) -> None:
        """Puts them in force. Call it on the device thread, between two steps: it makes rows and KV cache void."""
        if self.others is not None:
            self.others.install()
        with torch.inference_mode():
            for target, source in self.pairs:
                target.copy_(source)
        self.pairs.clear()
        if runner.device.type == "cuda":
            torch.cuda.empty_cache()
        runner.on_other_weights()


class Others(Protocol):
    """The other ranks of the group."""

    def install(self) -> None: ...

    def drop(self) -> None: ...


# Reads the wanted weights for the model of a runner. Raises the same errors as `load_weights`.
Load = Callable[[Runner, Weights], LoadedWeights]


def load_weights(config: ExecutorConfig, runner: Runner, wanted: Weights, group: Group = ALONE_GROUP) -> LoadedWeights:
    """Reads weights in addition to the runner's. Runs on a separate thread, on all ranks of the group at the same time.

    Raises:
        RpcError: FAILED_PRECONDITION, they do not have the wanted digest.
        StartupError, Differs, BrokenModel, OSError: they cannot replace the weights of the runner or of another rank.
        RankLost
    """
    try:
        served, pairs, digest, error = *_read(config, runner, wanted, group), None
    except Exception as raised:
        error = raised
    group.without_error(error)  # of any rank: the rest is done by all ranks together
    try:
        _check_numbers(runner, served, group)
    except Exception as raised:
        error = raised
    group.without_error(error)
    weights = Weights()
    weights.CopyFrom(wanted)
    weights.digest, weights.version = digest, wanted.version or digest
    return LoadedWeights(weights, pairs)


def _read(config: ExecutorConfig, runner: Runner, wanted: Weights, group: Group) -> tuple[ServedModel, Pairs, str]:
    if config.cpu_offload_gb:
        raise StartupError(of_replaced_offload())
    path = Path(resolve_model(wanted.model, wanted.revision or None, config.download_dir, config.accept_license))
    load_format = config.load_format
    if load_format == DUMMY and wanted.model != config.model:
        load_format = "auto"
    digest = digest_of(config, path, load_format)
    if wanted.digest not in ("", digest):
        raise RpcError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{path} has other weights than version {wanted.version}; restore its files, or replace the weights again",
        )
    # Without the cache of packed weights: each replacement would leave an entry there.
    settings = dataclasses.replace(config, weights_cache="")
    served = load_served(settings, path, runner.device, load_format, tensor=group.loading_tensor, stage=group.stage)
    if served.digest != digest:
        raise StartupError(f"{path} changed while it was read; replace the weights once it is complete")
    found = twins(runner.model, served.model) + twins(runner.pooling, served.pooling, "pooling")
    pairs = [pair for pair in found if not pair[1].is_meta]  # the others belong to other stages
    if any(source.dtype in _CHECKED_FOR_NAN and bool(source.isnan().any()) for _, source in pairs):
        raise BrokenModel("some weights are NaN: the checkpoint is damaged, or its training failed")
    return served, pairs, digest


def _check_numbers(runner: Runner, served: ServedModel, group: Group) -> None:
    """Raises BrokenModel for weights that yield no numbers."""
    limits = dataclasses.replace(runner.limits, max_num_seqs=1)
    stage = trial_stage(group, served.model, limits, runner.device)
    trial = ModelRunner(served.model, limits, 1, runner.device, pooling=served.pooling, stage=stage)
    probe(trial, served.model.config.vocab_size)


class Replacements:
    """The weights in force, and their possible replacement. All calls come from the event loop."""

    def __init__(self, worker: Worker, load: Load, first: Weights) -> None:
        """first: the weights of the worker's runner."""
        self._worker = worker
        self._load = load
        self._in_force = first
        self._loaded: LoadedWeights | None = None
        self._install_lock = asyncio.Lock()
        self._num_sleeps = 0
        self._reader = ThreadPoolExecutor(1, "weights", initializer=step_back)
        stats.WEIGHTS_VERSION.labels(first.version).set(1)

    async def in_force(self) -> Weights:
        """Returns the weights in force, after any running installation."""
        async with self._install_lock:
            return self._in_force

    async def load(self, wanted: Weights) -> Weights:
        """Makes weights ready to be installed; raises RpcError."""
        if self._loaded is not None and self._loaded.weights == wanted:
            return wanted
        self._loaded = None
        started, num_sleeps = time.perf_counter(), self._num_sleeps
        runner = self._worker.runner
        try:
            loaded = await asyncio.get_running_loop().run_in_executor(self._reader, self._load, runner, wanted)
        except (memory.OutOfMemoryError, torch.OutOfMemoryError, MemoryError) as error:
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"there is no memory for the second copy of the weights that a replacement needs: {error}",
            ) from error
        except (StartupError, Differs, BrokenModel, OSError) as error:
            raise RpcError(
                grpc.StatusCode.INVALID_ARGUMENT, f"these weights cannot replace the weights in force: {error}"
            ) from error
        if self._num_sleeps != num_sleeps:  # they would be copied to places that are gone
            message = "the model fell asleep while other weights were loaded; load them again once it is awake"
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, message)
        self._loaded = loaded
        seconds = time.perf_counter() - started
        stats.WEIGHTS_LOAD_SECONDS.observe(seconds)
        logger.info("loaded weights %s of %s in %.2f s", loaded.weights.version, wanted.model, seconds)
        return loaded.weights

    async def install(self, wanted: Weights) -> float:
        """Puts the loaded weights in force; returns the seconds in which no step could run. Raises RpcError."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or loaded.weights != wanted:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"weights {wanted.version} were not loaded")
        # The caller may disconnect meanwhile.
        return await asyncio.shield(asyncio.create_task(self._install(loaded)))

    async def _install(self, loaded: LoadedWeights) -> float:
        async with self._install_lock:
            started = time.perf_counter()
            await asyncio.wrap_future(self._worker.between_steps(loaded.install, "its weights were replaced"))
            seconds = time.perf_counter() - started
            stats.WEIGHTS_VERSION.clear()
            stats.WEIGHTS_VERSION.labels(loaded.weights.version).set(1)
            stats.WEIGHTS_INSTALL_SECONDS.observe(seconds)
            logger.info("weights %s are in force, installed in %.3f s", loaded.weights.version, seconds)
            self._in_force = loaded.weights
        await asyncio.to_thread(release_unused_memory)
        return seconds

    def drop(self) -> None:
        if self._loaded is not None and self._loaded.others is not None:
            self._loaded.others.drop()
        self._loaded = None

    def on_sleep(self) -> None:
        """Forgets loaded weights, as the model is about to be dropped."""
        self.drop()
        self._num_sleeps += 1

    def on_wake(self, first: Weights) -> None:
        """Takes in that the model was loaded again as at the start."""
        self._in_force = first
        stats.WEIGHTS_VERSION.clear()
        stats.WEIGHTS_VERSION.labels(first.version).set(1)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
