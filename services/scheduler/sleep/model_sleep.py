"""Puts the model to sleep and wakes it. An executor that sleeps has no stream, as one that is lost: so requests wait.

An executor is put to sleep, and woken, between the description that it gives of itself and the opening of its stream
(`ExecutorClient.on_connect`). So one that restarts meanwhile is put to sleep as well, and a scheduler that restarts
learns from descriptions whether the model sleeps: executors remember the last decision that they were told, and the
latest one counts. If all executors and the scheduler end, the model is awake: a stack that starts anew is to serve.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.engine import Engine
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.sleep.metrics import METRICS
from pagewire.v1.admin_pb2 import (
    ModelSleepStatus,
    SleepMode,
    SleepModelRequest,
    SleepModelResponse,
    WakeModelRequest,
    WakeModelResponse,
)
from pagewire.v1.executor_pb2 import DescribeResponse, SleepRequest, SleepState, WakeRequest
from pagewire.v1.executor_pb2_grpc import ExecutorServiceStub
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

_POLL_S = 0.02
# Seconds until a model that could not be woken is tried again: twice as long after each failure.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
_AWAKE = SleepState()


class ModelSleep:
    """Puts the executors of the model to sleep, and wakes them. All calls come from the event loop."""

    def __init__(self, engine: Engine, recovery_timeout: float, idle_timeout: float) -> None:
        """idle_timeout: seconds without a request after which the model falls asleep; 0: never."""
        self._engine = engine
        self._recovery_timeout, self._idle_timeout = recovery_timeout, idle_timeout
        self._wanted: SleepState | None = None  # None: no executor has said yet whether the model sleeps
        self._decided_at = 0  # when that was decided, Unix time, nanoseconds; 0: nothing was decided
        self._resting: dict[ReplicaDriver, int] = {}  # those that sleep, with their level
        self._failing = set[ReplicaDriver]()  # those that could not be woken
        self._falling: asyncio.Task[None] | None = None  # waits for running requests
        self._idle: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # set and replaced at each change
        self._problem: RpcError | None = None  # why the model could not be woken
        self._refusal: RpcError | None = None  # why an executor could not be put to sleep
        self._backoff, self._retry_at = FIRST_BACKOFF_S, 0.0
        self._used_at = time.monotonic()  # when a request came, or was seen running
        METRICS.source = self

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def _is_asleep(self) -> bool:
        return self._wanted is not None and self._wanted.level > 0

    @property
    def status(self) -> ModelSleepStatus:
        wanted = self._wanted or _AWAKE
        problem = "" if self._problem is None else self._problem.message
        return ModelSleepStatus(level=wanted.level, wakes_on_request=wanted.wakes_on_request, problem=problem)

    @property
    def levels(self) -> dict[str, int]:
        """The level at which each executor sleeps, by name; 0: it is awake. May be read on any thread."""
        return {one.replica.name: self._resting.get(one, 0) for one in list(self._engine.executors.drivers.values())}

    def _want(self, state: SleepState, decided_at: int | None = None) -> None:
        """Takes in a decision. decided_at: None: now."""
        self._decided_at = max(time.time_ns(), self._decided_at + 1) if decided_at is None else decided_at
        was, self._wanted = self.status.level, state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if was != state.level:
            self._engine.availability.greet_again()

    def check_awake(self) -> None:
        """Raises RpcError while the model sleeps: executors load nothing."""
        if self._is_asleep:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, "the model sleeps; wake it first")

    # -- operators ---------------------------------------------------------------------------------------------------

    async def sleep(self, request: SleepModelRequest) -> SleepModelResponse:
        """Puts the model to sleep, and returns when all executors sleep. Raises RpcError if it cannot sleep."""
        if request.level not in (1, 2):
            what = f"level is {request.level}; it must be 1 or 2"
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("level", what)])
        self._check_can_sleep()
        wanted = SleepState(level=request.level)
        if self._is_asleep:
            assert self._wanted is not None
            wanted.level = max(wanted.level, self._wanted.level)  # what was dropped stays so
            self._fall_asleep(wanted)
        elif request.mode == SleepMode.SLEEP_MODE_KEEP:
            self._fall_asleep(wanted)
        elif request.mode == SleepMode.SLEEP_MODE_ABORT:
            self._engine.end_all(None)
            self._fall_asleep(wanted)
        else:
            if self._falling is None:
                self._falling = asyncio.create_task(self._fall_asleep_later(wanted), name="sleep")
            with suppress(asyncio.CancelledError):  # of the task: the model is woken meanwhile
                await asyncio.shield(self._falling)
        await self._until(
            lambda: not self._is_asleep or self._rests(wanted.level),
            "the model falls asleep, but not all executors have answered",
        )
        if self._refusal is not None:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, self._refusal.message)
        if not self._is_asleep:
            raise RpcError(grpc.StatusCode.ABORTED, "the model was woken before all executors slept")
        return SleepModelResponse(num_executors=len(self._resting))

    async def wake(self, request: WakeModelRequest) -> WakeModelResponse:
        """Wakes the model, and returns when it takes requests. Raises RpcError if it cannot be woken."""
        if self._falling is not None:
            self._falling.cancel()
        resting, scheduler = list(self._resting), self._engine.scheduler
        if self._is_asleep:
            self._wake()

        def is_done() -> bool:
            others = (one for one in resting if not one.is_unlisted and one not in self._failing)
            return scheduler.info is not None and all(driver.has_executor for driver in others)

        await self._until(lambda: self._problem is not None or is_done(), "the model has not woken yet")
        if self._problem is not None:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, self._problem.message)
        return WakeModelResponse(num_executors=sum(replica.info is not None for replica in scheduler.replicas))

    def _check_can_sleep(self) -> None:
        if self._engine.weights.is_under_way:
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION, "weights are being replaced; try again when that has finished"
            )

    def _rests(self, level: int) -> bool:
        """Returns whether all executors sleep that can be reached, and one at least."""
        drivers = [one for one in self._engine.executors.drivers.values() if not one.is_unlisted]
        return bool(drivers) and all(self._resting.get(driver, 0) >= level for driver in drivers)

    async def _until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        """Waits, no longer than for a lost executor. Raises RpcError."""
        try:
            async with asyncio.timeout(self._recovery_timeout):
                while not is_so():  # noqa: ASYNC110 - of executors, too
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise RpcError(
                grpc.StatusCode.UNAVAILABLE, f"{otherwise}; it goes on: look at /v1/status", retry_delay=1.0
            ) from error

    # -- falling asleep ----------------------------------------------------------------------------------------------

    async def _fall_asleep_later(self, wanted: SleepState) -> None:
        """Lets running requests end first; those that have no token yet wait."""
        try:
            while not self._is_drained():  # noqa: ASYNC110 - of the scheduler, which has no events for it
                await asyncio.sleep(_POLL_S)
            self._fall_asleep(wanted)
        finally:
            self._falling = None
            if not self._is_asleep and not self._engine.weights.is_under_way:
                for replica in self._engine.scheduler.replicas:
                    replica.drain(begins=False)
                self._engine.wake_all()

    def _is_drained(self) -> bool:
        """Lets all executors drain; returns whether no request that has begun is left for them."""
        replicas = [replica for replica in self._engine.scheduler.replicas if replica.info is not None]
        for replica in replicas:
            if not replica.is_draining:
                replica.drain()
                self._engine.wake_all()
        has_begun = any(one.num_output_tokens for one in self._engine.scheduler.waiting)
        return not replicas or (not has_begun and all(replica.is_drained for replica in replicas))

    def _fall_asleep(self, wanted: SleepState, decided_at: int | None = None) -> None:
        """Ends the streams of all executors; what runs waits again, with its tokens."""
        self._problem, self._refusal, self._backoff = None, None, FIRST_BACKOFF_S
        self._want(wanted, decided_at)
        for driver in self._engine.executors.drivers.values():
            if driver.client.incarnation is not None:  # it has a stream, or opens one
                driver.client.start_over("its model falls asleep")

    # -- executors ---------------------------------------------------------------------------------------------------

    async def slept(self, driver: ReplicaDriver, description: DescribeResponse) -> bool:
        self._learn(description)
        present, changed = description.sleep, self._changed
        if not self._is_asleep:
            if not present.level:
                return False
            return await self._wake_executor(driver)
        assert self._wanted is not None
        wanted = self._wanted
        if present != wanted:
            try:
                await _stub(driver).Sleep(
                    SleepRequest(state=wanted, term=driver.client.term, decided_at=self._decided_at)
                )
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED):
                    raise
                self._on_refusal(driver, RpcError.from_call(error))
                return True
        self._resting[driver] = max(present.level, wanted.level)
        self._engine.availability.on_attached()  # requests wait without a limit, as the model is not lost
        try:
            await _until_changed(changed, driver)
        finally:
            del self._resting[driver]
        return True

    def _learn(self, description: DescribeResponse) -> None:
        """Takes in the first description of an executor, and the model in it."""
        if description.sleep.level:
            self._engine.availability.note(convert.to_executor_info(description))
            self._engine.weights.note(convert.to_weights(description.weights))  # it may wake with those of --model
        told = description.sleep_decision
        if self._wanted is not None and told.decided_at <= self._decided_at:
            return
        if self._wanted is None:
            self._want(told.state, told.decided_at)
        elif told.state.level:
            self._fall_asleep(told.state, told.decided_at)
        else:
            self._wake(told.decided_at)
        if self._is_asleep and told.state.wakes_on_request and self._engine.live:
            self._wake()

    def _on_refusal(self, driver: ReplicaDriver, error: RpcError) -> None:
        """Takes in that an executor cannot sleep: the model stays awake."""
        logger.error("the executor at %s cannot sleep: %s", driver.address, error.message)
        self._refusal = error
        self._want(SleepState())

    async def _wake_executor(self, driver: ReplicaDriver) -> bool:
        """Wakes one executor; returns True once it is to be described anew."""
        self._resting[driver] = 0
        self._engine.availability.on_attached()  # requests wait as long as it takes: it is not lost
        try:
            await _stub(driver).Wake(WakeRequest(term=driver.client.term, decided_at=self._decided_at))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise  # it is lost
            await self._on_failure(driver, RpcError.from_call(error))
        else:
            self._problem, self._backoff = None, FIRST_BACKOFF_S
            self._failing.discard(driver)
        finally:
            del self._resting[driver]
            if not self._resting and not self._is_asleep and self._engine.scheduler.info is None:
                self._engine.availability.start_waiting()
        return True

    async def _on_failure(self, driver: ReplicaDriver, error: RpcError) -> None:
        """Takes in that an executor could not be woken. While another one is awake or wakes, it is tried again;
        otherwise all requests end, and a later one tries again."""
        self._failing.add(driver)
        delay, self._backoff = self._backoff, min(2 * self._backoff, MAX_BACKOFF_S)
        logger.error("the executor at %s: %s; next attempt after %g s", driver.address, error.message, delay)
        if self._engine.scheduler.info is not None or len(self._resting) > 1:
            await asyncio.sleep(delay)
            return
        if self._is_asleep:  # meanwhile
            return
        self._retry_at = time.monotonic() + delay
        self._problem = RpcError(grpc.StatusCode.UNAVAILABLE, error.message, retry_delay=delay)
        self._want(SleepState(level=1, wakes_on_request=True))
        self._engine.availability.on_attached()
        self._engine.end_all(self._problem)

    # -- waking ------------------------------------------------------------------------------------------------------

    def _wake(self, decided_at: int | None = None) -> None:
        self._problem = None
        self._want(SleepState(), decided_at)
        self._engine.availability.start_waiting()

    def on_request(self) -> None:
        self._used_at = time.monotonic()
        if not self._is_asleep or self._wanted is None or not self._wanted.wakes_on_request:
            return
        if self._problem is not None and (left := self._retry_at - time.monotonic()) > 0:
            raise RpcError(self._problem.code, self._problem.message, retry_delay=left)
        logger.info("a request wakes the model")
        self._wake()

    # -- without requests --------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._idle_timeout:
            self._idle = asyncio.create_task(self._sleep_when_idle(), name="idle")

    def stop(self) -> None:
        for task in (self._idle, self._falling):
            if task is not None:
                task.cancel()

    async def _sleep_when_idle(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._idle_timeout / 4))
            is_awake = self._wanted is not None and not self._is_asleep and self._engine.scheduler.info is not None
            if not is_awake or self._engine.live:
                self._used_at = time.monotonic()
            elif time.monotonic() - self._used_at >= self._idle_timeout and self._falling is None:
                try:
                    self._check_can_sleep()
                except RpcError as error:
                    logger.warning("the model does not fall asleep: %s", error.message)
                    self._used_at = time.monotonic()
                    continue
                logger.info("no request for %g s: the model falls asleep", self._idle_timeout)
                self._fall_asleep(SleepState(level=1, wakes_on_request=True))


def _stub(driver: ReplicaDriver) -> Any:
    return ExecutorServiceStub(driver.channel)


async def _until_changed(changed: asyncio.Event, driver: ReplicaDriver) -> None:
    """Returns when another state is wanted, or the connection to the executor broke."""
    broken = driver.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    waits = [asyncio.ensure_future(one) for one in (changed.wait(), broken)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
