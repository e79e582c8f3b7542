"""A follower: a rank that computes its part of each step that the leader sends."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.files.models import find_model
from pagewire.process.priority import step_back
from pagewire.process.process import release_unused_memory
from pagewire.process.watchdog import BEAT_S
from pagewire.services.executor.adapters.host import with_adapters
from pagewire.services.executor.adapters.loading import load_adapter
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.parallel.group import REASON_S, Failure, Group, RankLost
from pagewire.services.executor.parallel.pipe import PeerLost
from pagewire.services.executor.ranks.formation import (
    common_flags,
    find_store,
    group_with_memory,
    group_with_torch,
    make_memory,
    secret_of,
)
from pagewire.services.executor.ranks.link import Link, connect, introduce
from pagewire.services.executor.ranks.outcomes import Outcomes
from pagewire.services.executor.ranks.piping import pipes_of, take_ends
from pagewire.services.executor.ranks.shards import FollowersShards
from pagewire.services.executor.ranks.tls_link import followers_link
from pagewire.services.executor.runner.runner import Begun
from pagewire.services.executor.service import convert
from pagewire.services.executor.service.replacement import LoadedWeights, load_weights
from pagewire.services.executor.service.sleep.rest import NoRoom, Rest, start_again
from pagewire.services.executor.service.sleep.resting_runner import RestingRunner
from pagewire.services.executor.tiers.runner import TieredRunner
from pagewire.services.executor.tiers.start import start_tiered
from pagewire.v1.common_pb2 import Adapter
from pagewire.v1.executor_pb2 import StepRequest, Weights
from pagewire.v1.rank_link_pb2 import RankCommand, RankReport
from pagewire.wire.tls import why_unavailable

logger = logging.getLogger(__name__)

_ENDED = "the leader has ended, and so does rank %d"


async def follow(config: ExecutorConfig) -> None:
    """Serves until the leader ends, or ends this rank. Raises StartupError if the rank cannot continue."""
    follower = Follower(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, follower.on_signal, number)
    done: Future[None] = Future()

    def run() -> None:
        try:
            follower.run()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    # A daemon: a device that hangs must not keep the process from ending.
    threading.Thread(target=run, name="device", daemon=True).start()
    try:
        await asyncio.wrap_future(done)
    except RankLost as error:
        raise StartupError(str(error)) from error


class Follower:
    """A rank from its start to its end. All calls except `on_signal` come from the device thread."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._gives_up = threading.Event()
        self._link: Link | None = None
        self._has_ended = False
        self._reader = ThreadPoolExecutor(1, "weights", initializer=step_back)
        self._loading: Future[LoadedWeights] | None = None
        self._outcomes = Outcomes()
        self._loop = asyncio.get_running_loop()
        self._shards: FollowersShards | None = None  # None: there are no tiers

    def on_signal(self, number: signal.Signals) -> None:
        """Leaves the end to the leader, which lets requests finish; a second signal ends this process at once."""
        if self._link is None:
            self._gives_up.set()
            return
        logger.info("this rank ends when its leader ends; a second %s ends it now", number.name)
        asyncio.get_running_loop().remove_signal_handler(number)

    def run(self) -> None:
        """Raises StartupError, RankLost, and any error of a broken device."""
        config = self._config
        link = connect(config.leader, self._gives_up, partial(followers_link, config))
        try:
            answer, descriptor = introduce(link, secret_of(config), config.rank, common_flags(config))
            self._link = link
            memory = None if descriptor is None else make_memory(config, descriptor)
            failure = Failure(memory)
            threading.Thread(target=self._watch, args=(link, failure), name="leader", daemon=True).start()
            if memory is not None:
                pipes = pipes_of(take_ends(link, config), config.rank, config)
                group = group_with_memory(config, config.rank, memory, failure, pipes)
            else:
                group = group_with_torch(config, config.rank, find_store(answer.store), failure)
            self._serve(link, group)
        except (EOFError, OSError) as error:
            if self._link is not None:
                is_gone = isinstance(error, (EOFError, ConnectionError))  # _watch() finds the same at about this time
                raise StartupError(f"{_ENDED % config.rank} ({error})" if is_gone else str(error)) from error
            cause = (not link.is_local and why_unavailable(config.leader, str(error))) or error
            raise StartupError(f"the connection to the leader is lost: {cause}") from error

    def _serve(self, link: Link, group: Group) -> None:
        try:
            path = find_model(self._config)
            started, info = start_tiered(self._config, str(path), _no_progress, group)
            if isinstance(started, TieredRunner):
                self._shards = FollowersShards(started, link, group.rank, group.size, self._loop)
            runner = RestingRunner(started)
            self._rest = Rest(self._config, path, info, partial(start_again, str(path), group), group)
            link.send(RankReport(ready=True))
            logger.info("rank %d of %d is ready", group.rank, group.size)
            while not self._has_ended:
                self._do(link.receive(RankCommand), runner, group)
        except (RankLost, EOFError, ConnectionError):
            raise
        except PeerLost as error:
            time.sleep(REASON_S)  # the leader finds out which rank was lost, and ends this process
            raise RankLost(f"the connection to another stage is lost: {error}") from error
        except Exception as error:
            link.send(RankReport(failed=f"{type(error).__name__}: {error}" if _is_defect(error) else str(error)))
            group.failure.set(str(error))
            raise

    def _do(self, command: RankCommand, runner: RestingRunner, group: Group) -> None:
        kind = command.WhichOneof("command")
        if kind == "step":
            if command.HasField("num_unknown"):
                self._outcomes.wait(command.num_unknown)
            self._execute(command.step, runner)
            group.check()
        elif kind == "reset":
            self._outcomes.clear()
            runner.reset()
        elif kind == "load":
            self._loading = self._reader.submit(self._load, command.load, runner, group)
        elif kind == "install":
            assert self._loading is not None
            self._loading.result().install(runner)
            self._loading = None
            release_unused_memory()
        elif kind == "drop":
            self._loading = None
        elif kind == "load_adapter":
            self._reader.submit(self._load_adapter, command.load_adapter, runner, group)
        elif kind == "drop_adapter":
            self._reader.submit(self._rest.adapters_of(runner).forget, command.drop_adapter)
        elif kind == "sleep":
            self._outcomes.clear()
            self._sleep(command.sleep, runner)
        elif kind == "wake":
            self._rest.come_back(runner)
            release_unused_memory()
        elif kind == "open_tiers":
            self._tiers.open(command.open_tiers)
        elif kind == "forget_blocks":
            self._tiers.forget(command.forget_blocks)
        else:
            self._has_ended = True
            if self._shards is not None:
                self._shards.close()

    def _execute(self, request: StepRequest, runner: RestingRunner) -> None:
        step, begun = convert.step_from_proto(request, runner.model.config.vocab_size), Begun()
        if step.slot_changes:
            step = with_adapters(step, self._slots(runner).host)
        if self._shards is not None:
            step = self._shards.attach(step, request)
        try:
            self._outcomes.add(runner.execute(step, begun))
        except Exception as error:
            if (
                begun.is_true or self._config.pipeline_parallel_size > 1
            ):  # with stages, the steps behind it are under way
                raise
            logger.exception("this rank cannot execute a step")
            assert self._link is not None
            self._link.send(RankReport(refused=f"{type(error).__name__}: {error}"))

    def _sleep(self, level: int, runner: RestingRunner) -> None:
        try:
            self._rest.leave(runner, level)
        except NoRoom as error:  # the leader reports it
            logger.error("there is no host memory for the weights of this rank: %s", error)
        gc.collect()
        release_unused_memory()

    def _load(self, wanted: Weights, runner: RestingRunner, group: Group) -> LoadedWeights:
        try:
            return load_weights(self._config, runner, wanted, group)
        except Exception as error:
            logger.error("these weights cannot replace the weights in force: %s", error)
            raise

    def _load_adapter(self, wanted: Adapter, runner: RestingRunner, group: Group) -> None:
        slots = self._slots(runner)
        try:
            slots.host.keep(load_adapter(slots, wanted, group))
        except Exception as error:
            logger.error("the adapter %s cannot be served: %s", wanted.name, error)

    @property
    def _tiers(self) -> FollowersShards:
        assert self._shards is not None  # the leader has some
        return self._shards

    def _slots(self, runner: RestingRunner) -> AdapterSlots:
        assert isinstance(runner.adapters, AdapterSlots)
        return runner.adapters

    def _watch(self, link: Link, failure: Failure) -> None:
        """Reports to the leader that this process is alive, and ends the process once the leader has ended."""
        try:
            while not link.has_gone(BEAT_S):
                link.send(RankReport(alive=True))
        except OSError:
            pass  # it has gone
        failure.set("the leader has ended")
        if not self._has_ended:
            logger.warning(_ENDED, self._config.rank)
            logging.shutdown()
            os._exit(1)


def _is_defect(error: Exception) -> bool:
    return not isinstance(error, StartupError)


def _no_progress(fraction: float, text: str) -> None:
    pass
