"""The executor process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import grpc
from tqdm import tqdm

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import older_flags
from pagewire.errors import StartupError
from pagewire.files.models import find_model
from pagewire.process.binding import DevicePlace
from pagewire.process.watchdog import Watchdog, end_process
from pagewire.services.executor.adapters.loading import load_adapter
from pagewire.services.executor.adapters.serving import ServedAdapters
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.grammar.grammars import Grammars
from pagewire.services.executor.parallel.group import ALONE_GROUP
from pagewire.services.executor.ranks.follower import follow
from pagewire.services.executor.ranks.leader import Leader
from pagewire.services.executor.ranks.start import LeadersStart
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.service.controls import Controls
from pagewire.services.executor.service.convert import first_weights
from pagewire.services.executor.service.replacement import Replacements, load_weights
from pagewire.services.executor.service.seams import Features
from pagewire.services.executor.service.sleep.rest import Rest, start_again
from pagewire.services.executor.service.sleep.resting_runner import RestingRunner
from pagewire.services.executor.service.sleep.sleeping import Sleeping
from pagewire.services.executor.service.work import NO_OBSERVER
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.start.startup import resolve_device
from pagewire.services.executor.tiers.start import served_tiers, start_tiered
from pagewire.telemetry.metrics import serve_metrics
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.secure_rpc import ServiceTls

logger = logging.getLogger(__name__)

_SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
_REPORT_EVERY_S = 0.5
_IN_TRANSIT_S = 0.3  # longest time of a step from the scheduler's decision to the device thread
_LAST_WORDS_S = 0.5
R = TypeVar("R", bound=Runner)


class LoadProgress:
    """Progress of the start, by phases: a bar on a terminal, else a log line `loading FRACTION TEXT` twice a second.

    The fraction starts again with a phase that takes long: reading weights, capturing CUDA graphs.
    """

    def __init__(self) -> None:
        self._last_report = 0.0
        self._bar = tqdm(total=100, desc="loading", unit="%", leave=False) if sys.stderr.isatty() else None

    def __call__(self, fraction: float, text: str) -> None:
        """Called on the device thread."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(round(100 * fraction) - self._bar.n)
        elif time.monotonic() - self._last_report >= _REPORT_EVERY_S:
            self._last_report = time.monotonic()
            logger.info("loading %.2f %s", fraction, text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


async def serve(config: ExecutorConfig) -> None:
    """Serves until a signal ends it. On SIGTERM the executor is no longer ready, so the scheduler places new requests
    elsewhere, and running requests finish.

    Raises StartupError if the model cannot be served, or if the device fails later: the process has to end then.
    """
    if config.rank > 0:
        await follow(config)
        return
    for line in older_flags(config):
        logger.warning(line)
    on_cuda = resolve_device(config.device).type == "cuda"
    progress = LoadProgress()
    watchdog = Watchdog(config.hang_timeout, lambda message: _end_hung(worker, message))
    leader = Leader(config, lambda error: worker.fail(error)) if config.num_ranks > 1 else None
    ranks = None if leader is None else LeadersStart(config, leader)
    start = partial(start_tiered, config) if ranks is None else ranks.runner
    place = None if on_cuda else DevicePlace(config)

    def rests(runner: Runner, info: ExecutorInfo) -> tuple[Runner, ExecutorInfo]:
        return RestingRunner(runner), info

    worker = Worker(
        lambda: rests(*_started(partial(start, str(find_model(config)), progress), place)),
        on_cuda=on_cuda,
        pulse=watchdog.pulse("the device"),
        observer=NO_OBSERVER if ranks is None else ranks.observer,
    )
    listen = config.listen.split(",")
    tls = ServiceTls(config, [*listen, config.leader] if config.leader else listen)
    server = rpc.Server(listen, config.shutdown_timeout, credentials=tls.of_services())
    load = partial(load_weights, config) if ranks is None else ranks.weights
    read = load_adapter if ranks is None else ranks.adapter

    def make_features(info: ExecutorInfo) -> Features:
        weights = Replacements(worker, load, first_weights(info, config.revision or ""))
        drop = None if ranks is None else ranks.drop_adapter
        adapters = ServedAdapters(worker.runner.adapters, read, config.lora_dir, drop)
        group = ALONE_GROUP if ranks is None else ranks.group
        again = partial(start_again, str(find_model(config)), group)
        rest = Rest(config, find_model(config), info, lambda *start: _started(partial(again, *start), place), group)
        sleep = Sleeping(worker, config, rest, weights, adapters, ranks)
        others = None if ranks is None else ranks.shards
        tiers = served_tiers(config, worker.runner, tls.channel, others)
        return Features(make_grammars(config, info), weights, adapters, tiers, sleep)

    servicer = Controls(worker, make_features)
    server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, _SERVICE)
    if leader is None:
        server.add_admin("executor")
    else:
        server.add_admin("executor", describe=leader.describe)
    await server.start()
    serve_metrics(config)
    if leader is not None:
        leader.start()
    worker.start()
    watchdog.start()
    stopping = asyncio.create_task(rpc.wait_for_signal())
    drained: Callable[[], Awaitable[None]] | None = None
    try:
        if await _first(worker.loaded, stopping):
            progress.close()
            _announce(worker.loaded.result(), config)
            await server.set_serving(True)
            await _first(worker.failed, stopping)
            if stopping.result():
                drained = partial(_until_idle, worker)
    except DeviceError as error:
        drained = server.links_ended  # the scheduler learns from its stream what failed
        raise StartupError(f"{error}; the process ends, so that a supervisor restarts it") from error
    finally:
        await rpc.cancel([stopping])
        await server.stop(drained)
        await asyncio.to_thread(worker.stop)
        watchdog.stop()
        await servicer.close()
        if leader is not None:
            leader.stop()
            leader.end_as_it_was_ended()
        if not worker.loaded.done():
            # The device thread still loads or compiles. The interpreter's end would wait for compilers, and abort
            # inside a kernel.
            logging.shutdown()
            os._exit(0)


def _started(start: Callable[[], tuple[R, ExecutorInfo]], place: DevicePlace | None) -> tuple[R, ExecutorInfo]:
    """Starts the runner on the device thread, which the call is on, and keeps that in its place."""
    if place is None:
        return start()
    place.compute()
    started = start()
    place.stay()
    return started


def make_grammars(config: ExecutorConfig, info: ExecutorInfo) -> Grammars:
    return Grammars(
        lambda: find_model(config),
        info.vocab_size,
        info.eos_token_ids,
        timeout=config.grammar_compile_timeout,
        cache_size=config.grammar_cache_size,
        closes=not config.allow_additional_properties,
    )


def _end_hung(worker: Worker, message: str) -> None:
    """Ends this process after a moment in which the event loop, if it is alive, can send the reason."""
    worker.end_stream(DeviceError(message, grpc.StatusCode.DEADLINE_EXCEEDED))
    time.sleep(_LAST_WORDS_S)
    end_process(message)


async def _until_idle(worker: Worker) -> None:
    """Returns after a moment without work: the first step of a request may be in transit."""
    idle_since = time.monotonic()
    while not worker.failed.done() and time.monotonic() < idle_since + _IN_TRANSIT_S:
        await asyncio.sleep(0.02)  # another thread's state
        if not worker.is_idle:
            idle_since = time.monotonic()


async def _first(work: Future[Any], stopping: asyncio.Task[bool]) -> bool:
    """Returns whether `work` was done before a signal to stop. Raises what `work` raised."""
    waiting = asyncio.wrap_future(work)
    await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        return False
    waiting.result()
    return True


def _announce(info: ExecutorInfo, config: ExecutorConfig) -> None:
    largest = max(info.kv_groups, key=lambda group: group.num_blocks, default=None)
    logger.info(
        "serving %s on %s: %s, %s, %.0f MiB weights, KV cache %d blocks x %d tokens (%.0f MiB, %s), "
        "max_model_len %d, listening on %s",
        info.model,
        info.device,
        info.dtype,
        f"up to {info.max_num_seqs} requests",
        info.weight_bytes / 2**20,
        info.num_blocks,
        (largest and largest.state_tokens) or info.block_size,
        info.kv_cache_bytes / 2**20,
        info.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        info.max_model_len,
        config.listen,
    )
