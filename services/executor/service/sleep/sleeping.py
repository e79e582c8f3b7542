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
from typing import Protocol

import grpc

from pagewire.config import ExecutorConfig
from pagewire.process.process import release_unused_memory
from pagewire.services.executor.adapters.serving import ServedAdapters
from pagewire.services.executor.service.convert import first_weights
from pagewire.services.executor.service.replacement import Replacements
from pagewire.services.executor.service.sleep.rest import NoRoom, Rest
from pagewire.services.executor.service.sleep.resting_runner import RestingRunner, asleep
from pagewire.services.executor.service.worker import Worker
from pagewire.v1.executor_pb2 import DescribeResponse, SleepDecision, SleepState
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

LEVELS = (1, 2)


class OtherRanks(Protocol):
    """The other ranks of the executor. Both calls come from the device thread and may raise RankLost."""

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...


class Sleeping:
    """The sleep of an executor's model. All calls come from the event loop."""

    def __init__(
        self,
        worker: Worker,
        config: ExecutorConfig,
        rest: Rest,
        weights: Replacements,
        adapters: ServedAdapters,
        others: OtherRanks | None = None,
    ) -> None:
        """worker: its runner is a `RestingRunner`. rest: of this rank's model."""
        self._worker, self._config, self._rest, self._others = worker, config, rest, others
        self._weights, self._adapters = weights, adapters
        self._lock = asyncio.Lock()
        self.state = SleepState()
        self._decision = SleepDecision()  # the latest

    def check(self) -> None:
        if self.state.level:
            raise asleep()

    def close(self) -> None:
        pass

    def describe(self, response: DescribeResponse) -> None:
        if self.state.level:
            response.sleep.CopyFrom(self.state)
        if self._decision.decided_at:
            response.sleep_decision.CopyFrom(self._decision)

    def _on_decision(self, state: SleepState, decided_at: int) -> None:
        if decided_at >= self._decision.decided_at:
            self._decision = SleepDecision(state=state, decided_at=decided_at)

    async def fall_asleep(self, wanted: SleepState, decided_at: int) -> float:
        if wanted.level not in LEVELS:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"there is no sleep of level {wanted.level}; use 1 or 2")
        self._on_decision(wanted, decided_at)
        # The caller may disconnect meanwhile.
        return await asyncio.shield(asyncio.create_task(self._fall_asleep(wanted)))

    async def wake(self, decided_at: int) -> float:
        self._on_decision(SleepState(), decided_at)
        return await asyncio.shield(asyncio.create_task(self._wake()))

    async def _fall_asleep(self, wanted: SleepState) -> float:
        async with self._lock:
            started = time.perf_counter()
            was_awake = not self.state.level
            if was_awake:
                await self._adapters.on_sleep()
                self._weights.on_sleep()
                self.state.CopyFrom(wanted)  # from now on, no stream can be opened
            elif wanted.level <= self.state.level:
                self.state.wakes_on_request = wanted.wakes_on_request
                return 0.0
            failures: list[NoRoom] = []
            leaving = self._worker.between_steps(
                lambda _: self._leave(wanted.level, failures), "its model falls asleep", within=None
            )
            await asyncio.wrap_future(leaving)
            if failures:
                self.state.Clear()
                raise RpcError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"there is no host memory for the weights, so the model stays awake: {failures[0]}; use level 2",
                ) from failures[0]
            self.state.CopyFrom(wanted)
            if not was_awake:
                return 0.0
            await asyncio.to_thread(_give_back)
            seconds = time.perf_counter() - started
            logger.info("the model sleeps, level %d, after %.2f s", wanted.level, seconds)
            return seconds

    async def _wake(self) -> float:
        async with self._lock:
            if not self.state.level:
                return 0.0
            started = time.perf_counter()
            failures: list[Exception] = []
            was_kept = self._rest.keeps_weights
            await asyncio.wrap_future(
                self._worker.between_steps(lambda _: self._return(failures), "its model wakes", within=None)
            )
            if failures:
                await asyncio.to_thread(_give_back)
                logger.error("the model cannot be woken: %s", failures[0])
                raise RpcError(
                    grpc.StatusCode.FAILED_PRECONDITION, f"the model cannot be woken: {failures[0]}"
                ) from failures[0]
            if not was_kept:
                self._weights.on_wake(first_weights(self._rest.info, self._config.revision or ""))
            self._adapters.on_wake(self._worker.runner.adapters)
            self.state.Clear()
            seconds = time.perf_counter() - started
            logger.info("the model is awake after %.2f s", seconds)
            return seconds

    # -- on the device thread ----------------------------------------------------------------------------------------

    @property
    def _resting(self) -> RestingRunner:
        runner = self._worker.runner
        assert isinstance(runner, RestingRunner)
        return runner

    def _leave(self, level: int, failures: list[NoRoom]) -> None:
        if self._others is not None:
            self._others.sleep(level)
        try:
            self._rest.leave(self._resting, level)
        except NoRoom as error:
            failures.append(error)

    def _return(self, failures: list[Exception]) -> None:
        if (
            self._others is not None
        ):  # they may have woken without this one: an error ends the group, which starts again
            self._others.wake()
            self._rest.come_back(self._resting)
            return
        try:
            self._rest.come_back(self._resting)
        except Exception as error:
            failures.append(error)


def _give_back() -> None:
    gc.collect()
    release_unused_memory()
