"""The engine: takes requests in, sends steps to the executors, and returns tokens to the clients.

Everything runs on one event loop. `core/scheduler.py` decides; this file carries the decisions out.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

import grpc

from pagewire.config import SchedulerConfig
from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import NotInterchangeable, QueueFull, Scheduler
from pagewire.services.scheduler.core.wakes import Wakes
from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.observed.timeline import QUEUE
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.availability import Availability
from pagewire.services.scheduler.service.delivery import Delivery
from pagewire.services.scheduler.service.executors import Connect, Executors
from pagewire.services.scheduler.service.expiry import Expiry, expired
from pagewire.services.scheduler.service.intake import check_length, crashed_executors, status_of
from pagewire.services.scheduler.service.live_request import LiveRequest
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.service.request_output import RequestOutbox
from pagewire.services.scheduler.service.seams import (
    AdaptersInForce,
    Admission,
    CompileGrammar,
    HeldOutputs,
    Sleep,
    WeightsInForce,
)
from pagewire.services.scheduler.service.tracking import Tracking
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, Weights
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepClock, StepResult
from pagewire.telemetry.spans import Span
from pagewire.telemetry.trace import Trace
from pagewire.v1.executor_pb2 import DescribeResponse
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire.discovery.listed import Discovery
from pagewire.wire.rpc import RpcError, timeout_of
from pagewire.wire.streams import Draining

logger = logging.getLogger(__name__)


class Engine:
    """Drives one scheduler and its replicas, each with one executor, for many clients."""

    def __init__(
        self,
        config: SchedulerConfig,
        discovery: Discovery,
        connect: Connect,
        scheduler: Scheduler,
        admission: Admission,
        compile_grammar: CompileGrammar,
        make_weights: Callable[["Engine"], WeightsInForce],
        make_adapters: Callable[["Engine"], AdaptersInForce],
        make_sleep: Callable[["Engine"], Sleep],
        make_held: Callable[[Callable[[], None]], HeldOutputs],
    ) -> None:
        """connect: makes the channel to a listed executor. scheduler: without replicas."""
        self._config = config
        self._discovery = discovery
        self.scheduler = scheduler
        self._wakes = Wakes(self.scheduler)
        self._admission = admission
        self._compile_grammar = compile_grammar
        self._expiry = Expiry(self._expire)
        self._stats = self.stats = stats.Stats(self.scheduler)
        self._term = time.time_ns()  # higher for a scheduler that starts later
        self.executors = Executors(self.scheduler, connect, self._make_driver, self)
        self._drivers = self.executors.drivers
        self._delivery = Delivery(
            self.scheduler, self._admission, self._expiry, self._stats, self._wake_after_end, make_held
        )
        self.accounts, self.live = self._delivery.accounts, self._delivery.live
        self._tracking = Tracking(self.live)
        self.availability = Availability(config, self.executors.starting, self._on_given_up)
        self.draining = Draining()
        self._last_request_id = 0
        self.weights = make_weights(self)
        self.adapters = make_adapters(self)
        self.sleep = make_sleep(self)

    # -- clients -----------------------------------------------------------------------------------------------------

    def submit(
        self, submission: TokenSubmission, outbox: RequestOutbox, number: int, max_unread: int | None = None
    ) -> LiveRequest:
        """Takes in a request; its outputs go to the outbox under `number`. The request ends with RESOURCE_EXHAUSTED
        once more than max_unread of its tokens and log probabilities are in the outbox.

        Raises:
            RpcError: INVALID_ARGUMENT, RESOURCE_EXHAUSTED or UNAVAILABLE; the request was not taken in.
        """
        self.availability.check()
        check_length(submission, self.availability.info, is_served=self.scheduler.info is not None)
        self.sleep.on_request()
        self._last_request_id += 1
        timeout = timeout_of(submission.context)
        try:
            digest = self.adapters.pin(submission)
            request = convert.to_request(self._last_request_id, submission, self._config, digest)
            self.weights.check(request)
            self._admission.check(request, timeout)
            is_live = bool(request.has_grammar or digest) or self.scheduler.add_request(request)
        except InvalidRequest as error:
            raise status_of(error) from error
        except QueueFull as error:
            raise status_of(error, self._admission.retry_delay(request)) from error
        now = time.monotonic()
        span = Span("generate", Trace.of(submission.context), serves=True, start=now)
        live = LiveRequest(request, outbox, number, submission.request.external_id, max_unread, span, now)
        self._admission.on_taken(live)
        if timeout is not None:
            self._expiry.add(request.request_id, timeout)
        self._delivery.add(live)
        if request.has_grammar or digest:
            live.preparing = asyncio.create_task(self._add_prepared(live), name="prepare")
        elif is_live:
            self._wake(self._wakes.after_arrival(request))
        else:
            self._delivery.end(live)
        return live

    async def _add_prepared(self, live: LiveRequest) -> None:
        """Hands a request to the scheduler once its grammar is compiled and its adapter is loaded, or ends it."""
        request = live.request
        try:
            if request.has_grammar:
                await self._compile_grammar(request.sampling_params.grammar, self._drivers)
            if request.adapter_digest:
                await self.adapters.prepare(request)
            live.preparing = None
            live.timeline.enter(QUEUE, time.monotonic())
            self.weights.check(request)  # its weights may have been replaced meanwhile
            is_live = self.scheduler.add_request(request)
        except (RpcError, InvalidRequest, QueueFull) as error:
            request.finish(FinishReason.ERROR)
            delay = self._admission.retry_delay(request) if isinstance(error, QueueFull) else None
            self._delivery.end(live, status_of(error, delay))
            return
        if is_live:
            self._wake(self._wakes.after_arrival(request))
        else:
            self._delivery.end(live)

    def _stop(self, live: LiveRequest, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a live request, either in the scheduler or before it is there."""
        if live.preparing is not None:
            live.preparing.cancel()
            live.request.finish(reason)
        else:
            self.scheduler.abort(live.request, reason)

    def end_request(self, request: Request, error: RpcError) -> None:
        """Ends a request and reports the error to its client; does nothing if it has ended."""
        self._delivery.deliver()
        if (live := self._delivery.live.get(request.request_id)) is not None:
            self._stop(live, FinishReason.ERROR)
            self._delivery.end(live, error)
            self._wake_after_end()

    def abort(self, live: LiveRequest) -> None:
        """Ends a request without a report to its client; does nothing if it has ended."""
        if live.request.request_id in self._delivery.live:
            if not live.request.is_finished:
                self._stop(live)
            self._delivery.close(live)
            self._wake_after_end()

    def abort_external(self, external_ids: set[str], tenant: str | None = None) -> int:
        """Ends requests by their client-given ids, reports that to their clients, and returns the number of requests.

        tenant: the owner of the requests; None: any.
        """
        self._delivery.deliver()
        found = [live for live in self._delivery.live.values() if live.goes_by(external_ids, tenant)]
        for live in found:
            self._stop(live)
            self._delivery.end(live)
        self._wake_after_end()
        return len(found)

    def _expire(self, request_id: int) -> None:
        """Ends a request after its deadline, which frees its row and blocks at once."""
        self._delivery.deliver()
        if (live := self._delivery.live.get(request_id)) is not None:
            self.end_request(live.request, expired(live))

    async def drained(self) -> None:
        """Waits until no request is live, or until a later scheduler has the executors and thus receives the
        requests."""
        live, drivers = self.live, self._drivers
        while live and not (drivers and all(driver.client.was_refused for driver in drivers.values())):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    # -- the executors -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until cancelled."""
        self.availability.start_waiting()
        self.sleep.start()
        try:
            await self.executors.run(self._discovery)
        finally:
            self.availability.stop()
            self._expiry.stop()
            self.weights.stop()
            self.adapters.stop()
            self.sleep.stop()

    def wake_all(self) -> None:
        for driver in self._drivers.values():
            driver.wake()

    def _wake(self, replicas: Iterable[Replica]) -> None:
        for replica in replicas:
            self._drivers[replica.replica_id].wake()

    def _wake_after_end(self) -> None:
        self._wake(self._wakes.after_end())

    def _make_driver(self, replica: Replica, address: str, channel: grpc.aio.Channel) -> ReplicaDriver:
        hang_timeout = self._config.hang_timeout
        return ReplicaDriver(self.scheduler, replica, channel, address, self._term, self, self._stats, hang_timeout)

    def before_step(self) -> None:
        self._expiry.check()

    def on_decision(self, replica: Replica, step: ScheduledStep | None) -> None:
        self._tracking.on_decision(replica)
        self._wake(self._wakes.after_decision(replica, step))

    def on_step(self, replica: Replica, step: ScheduledStep) -> list[Trace]:
        self._tracking.on_step(replica, step)
        return self._delivery.on_admitted(step.admitted)

    async def slept(self, replica: Replica, description: DescribeResponse) -> bool:
        return await self.sleep.slept(self._drivers[replica.replica_id], description)

    def on_described(self, replica: Replica, incarnation: int, present: Weights) -> Weights:
        self.executors.check_unused(replica, incarnation)
        return self.weights.wanted(present)

    def on_attached(self, replica: Replica, info: ExecutorInfo) -> None:
        info = info.within_steps_of(self._config.max_num_batched_tokens)
        self._delivery.deliver()
        self._end_suspects(self.scheduler.on_successor(replica, info), Loss.EXIT, "its process failed")
        try:
            ended = self.scheduler.attach(replica, info)
        except NotInterchangeable as difference:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, str(difference)) from difference
        logger.info(
            "executor %016x at %s serves %s: %d KV blocks, %d rows, %d tokens per step",
            info.incarnation,
            self._address(replica),
            info.model if info.role == "both" else f"{info.model} ({info.role})",
            info.num_blocks,
            info.max_num_seqs,
            info.max_num_batched_tokens,
        )
        self.availability.on_attached()
        for request, error in ended:
            status = status_of(error) if error else None
            self._delivery.end(self._delivery.live[request.request_id], status)
        self.availability.note(self.scheduler.info)
        self.weights.on_attached()
        self.adapters.on_attached(self._drivers[replica.replica_id])
        self.wake_all()

    def on_result(self, replica: Replica, result: StepResult, clock: StepClock, seconds: float) -> None:
        self._delivery.held.deliver_due()
        self._tracking.on_result(replica, result.step_id)
        outputs = self.scheduler.update(replica, result, seconds)
        # The driver runs first, so that the device receives its next step before clients receive these outputs.
        self._wake(self._wakes.after_result(replica))
        self._delivery.held.add(outputs)
        if self.weights.is_under_way:
            self.weights.notify()
        if not replica.num_running:
            self.executors.on_progress()
        self._stats.on_result(len(outputs.token_ids), clock)

    def on_lost(self, replica: Replica, loss: Loss, reason: str) -> None:
        if not loss.is_wanted:
            logger.warning(
                "lost the executor at %s (%s); its %d requests continue elsewhere or when it is back; %d requests wait",
                self._address(replica),
                reason,
                replica.num_running,
                self.scheduler.num_waiting,
            )
            stats.RECOVERIES.inc()
        self._delivery.deliver()
        self._admission.on_executor_lost()
        ended = self.scheduler.detach(replica, loss)
        self._tracking.on_lost(replica)
        self._end_suspects(ended, loss, reason)
        self.executors.on_progress()
        self.availability.note(self.scheduler.info)
        self.weights.notify()
        self.weights.watch_stranded(list(self.scheduler.waiting))
        if self.scheduler.info is None:
            self.availability.on_all_lost(loss is not Loss.WEIGHTS)  # after a replacement, the executor is back at once
        self.wake_all()

    def on_listed(self) -> None:
        self.weights.notify()
        self.wake_all()

    def on_left(self, replica: Replica) -> None:
        self.on_lost(replica, Loss.UNLISTED, "it has left the list")

    def on_removed(self, replica: Replica) -> None:
        self._wakes.forget(replica)
        self._stats.on_removed(replica)
        self._tracking.on_removed(replica)

    def _end_suspects(self, ended: Mapping[Request, int], loss: Loss, reason: str) -> None:
        """Reports to clients that their requests crash executors. ended: request -> number of lost executors."""
        for request, num_losses in ended.items():
            stats.CONDEMNED.labels(loss).inc()
            self._delivery.end(self._delivery.live[request.request_id], crashed_executors(num_losses, reason))

    def _address(self, replica: Replica) -> str:
        return self._drivers[replica.replica_id].address

    def _on_given_up(self, error: RpcError) -> None:
        """Ends all requests because no executor connected in time."""
        if self.live or not self.executors.starting():
            logger.error("%s; ending %d requests", error.message, len(self.live))
        self.end_all(error)

    def end_all(self, error: RpcError | None) -> None:
        """Ends all requests, with an error or with the tokens that they have."""
        self._delivery.deliver()
        for live in list(self.live.values()):
            self._stop(live, FinishReason.ERROR if error else FinishReason.ABORT)
            self._delivery.end(live, error)
        self._wake_after_end()
