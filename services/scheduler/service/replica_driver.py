"""The driver of one replica: sends its steps to its executor when they are due, and passes results to the engine."""

import asyncio
import logging
import time
from typing import Protocol

import grpc

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.service.executor_client import ExecutorClient
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, Weights
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.step import ScheduledStep, StepClock, StepResult
from pagewire.telemetry.trace import Trace
from pagewire.v1.executor_pb2 import DescribeResponse

logger = logging.getLogger(__name__)


class ReplicaListener(Protocol):
    """Receives the events of the replicas, one at a time."""

    async def slept(self, replica: Replica, description: DescribeResponse) -> bool: ...

    def on_described(self, replica: Replica, incarnation: int, present: Weights) -> Weights:
        """Returns the weights that an executor with `present` must have before it is used.

        Raises RpcError FAILED_PRECONDITION if another replica has this executor.
        """

    def on_attached(self, replica: Replica, info: ExecutorInfo) -> None: ...

    def on_lost(self, replica: Replica, loss: Loss, reason: str) -> None:
        """Takes in that the executor is lost with all steps in flight. reason: shown in the log and to clients."""

    def before_step(self) -> None:
        """Takes in that the next step is about to be decided."""

    def on_decision(self, replica: Replica, step: ScheduledStep | None) -> None:
        """Takes in a decision, after which other replicas may take waiting requests. step: None if nothing runs."""

    def on_step(self, replica: Replica, step: ScheduledStep) -> list[Trace]:
        """Takes in a step that is about to be sent; returns the traces of the requests that it admits."""

    def on_result(self, replica: Replica, result: StepResult, clock: StepClock, seconds: float) -> None:
        """Takes in a result. seconds: the time since the previous result, or since the step was sent if that was later.

        Raises InvalidResult.
        """


class ReplicaDriver:
    """Decides the steps of a replica at the times that its pacer sets, sends them, and passes results on."""

    def __init__(
        self,
        scheduler: Scheduler,
        replica: Replica,
        channel: grpc.aio.Channel,
        address: str,
        term: int,
        listener: ReplicaListener,
        statistics: stats.Stats,
        hang_timeout: float = 0.0,
    ) -> None:
        self._scheduler = scheduler
        self.replica = self._replica = replica
        self.channel, self.address = channel, address
        self.is_unlisted = False  # no new requests; the replica is removed when no request runs on it
        self._is_ending = False  # the executor has reported this
        self._listener = listener
        self._stats = statistics
        self.client = ExecutorClient(channel, address, term, self, hang_timeout)
        self._failure: asyncio.Future[None] | None = None  # of a decision, while the driver runs
        self._is_woken = False
        self._timer: asyncio.TimerHandle | None = None  # wakes it when a step is due

    @property
    def has_executor(self) -> bool:
        return self._replica.info is not None

    def set_listed(self, is_listed: bool) -> None:
        self.is_unlisted = not is_listed
        self._replica.is_leaving = self._is_ending or self.is_unlisted

    def wake(self) -> None:
        """Makes the driver look for a step to decide, soon."""
        if not self._is_woken and self._failure is not None:
            self._is_woken = True
            self._failure.get_loop().call_soon(self._send_steps)

    async def run(self) -> None:
        """Connects to the executor, and sends steps until cancelled."""
        self._failure = asyncio.get_running_loop().create_future()
        self.wake()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.client.run(), name="executor-client")
                await self._failure
        finally:
            self._failure = None
            self._stop_timer()

    def _send_steps(self) -> None:
        self._is_woken = False
        if self._failure is None or self._failure.done():
            return
        try:
            while not self._holds_back() and self._send_step():
                pass
        except Exception as error:
            self._failure.set_exception(error)  # run() raises it

    def _send_step(self) -> bool:
        """Decides and sends the next step. Returns whether another one may follow at once."""
        self._listener.before_step()
        start = time.perf_counter()
        step = self._scheduler.schedule(self._replica)
        self._listener.on_decision(self._replica, step)
        if step is None:
            return False
        schedule_seconds, num_tokens = time.perf_counter() - start, sum(step.num_scheduled_tokens)
        self._replica.pacer.on_sent(self._replica.expected_seconds(step), time.monotonic())
        self._stats.on_step(self._replica, num_tokens, schedule_seconds)
        self.client.send(step, self._listener.on_step(self._replica, step))
        return self._replica.can_schedule

    def _holds_back(self) -> bool:
        """Returns whether the next step should be decided later, and sets a timer for that time."""
        self._stop_timer()
        seconds = self._replica.pacer.hold(time.monotonic())
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.wake)
        return seconds > 0

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- ExecutorListener --------------------------------------------------------------------------------------------

    async def slept(self, description: DescribeResponse) -> bool:
        return await self._listener.slept(self._replica, description)

    def on_described(self, incarnation: int, present: Weights) -> Weights:
        return self._listener.on_described(self._replica, incarnation, present)

    def on_executor(self, info: ExecutorInfo) -> None:
        self._is_ending = False
        self._listener.on_attached(self._replica, info)
        self._replica.is_leaving = self.is_unlisted

    def on_result(self, result: StepResult, clock: StepClock) -> None:
        if result.loaded and (tiers := self._replica.kv.tiers) is not None:
            tiers.end_loads(result.loaded)
            self.wake()
            return
        now = time.monotonic()
        self._listener.on_result(self._replica, result, clock, self._replica.pacer.seconds_of_oldest(now))
        self._replica.pacer.on_result(clock.execute_seconds, clock.idle_seconds, now)

    def on_leaving(self, is_leaving: bool) -> None:
        self._is_ending = is_leaving
        self._replica.is_leaving = is_leaving or self.is_unlisted

    def on_executor_lost(self, loss: Loss, reason: str) -> None:
        self._listener.on_lost(self._replica, loss, reason)
