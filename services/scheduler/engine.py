"""The scheduler at work: requests come in, steps go to the executors, tokens go back to whoever asked.

Everything runs on one event loop. Decisions are `scheduler.py`'s; this file moves their results.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import grpc

from pagewire import telemetry
from pagewire.config import SchedulerConfig
from pagewire.rpc import RpcError, timeout_of
from pagewire.sampling_params import InvalidRequest
from pagewire.services.scheduler import convert, stats
from pagewire.services.scheduler.admission import NOTHING_KNOWN, WaitTooLong
from pagewire.services.scheduler.entrance import Entrance, condemned, expired
from pagewire.services.scheduler.executor_info import ExecutorInfo, Weights
from pagewire.services.scheduler.expiry import Expiry
from pagewire.services.scheduler.grammars import compile_grammar
from pagewire.services.scheduler.live_request import LiveRequest
from pagewire.services.scheduler.loss import GOES_OVER, loss_of
from pagewire.services.scheduler.outcome import Outputs
from pagewire.services.scheduler.replica import Replica
from pagewire.services.scheduler.replica_driver import ReplicaDriver
from pagewire.services.scheduler.request import FinishReason, Request
from pagewire.services.scheduler.request_output import MAX_UNREAD_OF_STREAM, RequestOutbox, RequestOutput
from pagewire.services.scheduler.rollout import Rollout
from pagewire.services.scheduler.scheduler import NotInterchangeable, QueueFull, Scheduler
from pagewire.services.scheduler.step import ScheduledStep, StepClock, StepResult
from pagewire.v1.scheduler_link_pb2 import TokenSubmission

logger = logging.getLogger(__name__)


class Engine:
    """Drives one scheduler and its replicas, one executor each, on behalf of many clients.

    `availability` tells of every change between "requests are served" and "requests wait, or are refused".
    """

    def __init__(self, config: SchedulerConfig, executor_channels: Sequence[grpc.aio.Channel]) -> None:
        """executor_channels: to config.executor_addresses."""
        self._config = config
        self.scheduler = Scheduler(config, len(executor_channels))
        self._entrance = Entrance(self.scheduler, config.max_queue_time)
        self._expiry = Expiry(self._expire)
        self._stats = stats.Stats(self.scheduler)
        term = time.time_ns()  # a scheduler that starts later has a higher one
        self._drivers = [
            ReplicaDriver(self.scheduler, replica, channel, address, term, self, self._stats, config.hang_timeout)
            for replica, channel, address in zip(
                self.scheduler.replicas, executor_channels, config.executor_addresses, strict=True
            )
        ]
        self.rollout = Rollout(self.scheduler, self._drivers, self._wake, self._end_request, config.recovery_timeout)
        self._live: dict[int, LiveRequest] = {}
        self._last_request_id = 0
        self._undelivered: Outputs | None = None  # of the latest result, not told yet
        self._idle = asyncio.Event()  # no request is live
        self._idle.set()
        self._info: ExecutorInfo | None = None  # of the present executors or of the last one
        self._changed = asyncio.Event()  # an executor came, or all were given up
        self._watchdog: asyncio.TimerHandle | None = None
        self._is_available = True
        self.availability: asyncio.Queue[bool] = asyncio.Queue()
        self.on_model_change: set[Callable[[], None]] = set()

    # -- clients -----------------------------------------------------------------------------------------------------

    def submit(
        self, submission: TokenSubmission, outbox: RequestOutbox, number: int, max_unread: int | None = None
    ) -> LiveRequest:
        """Takes a request in; its outputs go to the outbox under `number`. With more than max_unread tokens and log
        probabilities in the outbox it ends with RESOURCE_EXHAUSTED.

        Raises:
            RpcError: INVALID_ARGUMENT, RESOURCE_EXHAUSTED or UNAVAILABLE; the request was not taken.
        """
        if not self._is_available:
            raise self._unavailable()
        self._entrance.check_length(submission, self._info)
        self._last_request_id += 1
        forecast, timeout = NOTHING_KNOWN, timeout_of(submission.context)
        try:
            request = convert.to_request(self._last_request_id, submission, self._config.prefix_cache_sharing == "all")
            self.rollout.check(request)
            forecast = self._entrance.check(request, timeout)
            is_live = request.has_grammar or self.scheduler.add_request(request)
        except (InvalidRequest, QueueFull, WaitTooLong) as error:
            raise self._entrance.status_of(error, forecast) from error
        traceparent = submission.context.traceparent
        span = telemetry.Span("scheduler.queue", traceparent)
        live = LiveRequest(
            request, outbox, number, submission.request.external_id, traceparent, max_unread, span, time.monotonic()
        )
        self._entrance.on_taken(live, forecast)
        if timeout is not None:
            self._expiry.add(request.request_id, timeout)
        self._live[request.request_id] = live
        self._idle.clear()
        if request.has_grammar:
            live.compiling = asyncio.create_task(self._add_compiled(live), name="grammar")
        elif is_live:
            self._wake()
        else:
            self._end(live)
        return live

    async def _add_compiled(self, live: LiveRequest) -> None:
        """Hands a request to the scheduler once its grammar is compiled, or ends it."""
        request = live.request
        try:
            await compile_grammar(
                request.sampling_params.grammar, lambda: [d.compile for d in self._drivers if d.has_executor]
            )
            live.compiling = None
            is_live = self.scheduler.add_request(request)
        except (RpcError, InvalidRequest, QueueFull) as error:
            request.finish(FinishReason.ERROR)
            self._end(live, self._entrance.status_of(error, live.forecast))
            return
        if is_live:
            self._wake()
        else:
            self._end(live)

    def _stop(self, live: LiveRequest, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a live request, wherever it is."""
        if live.compiling is not None:
            live.compiling.cancel()
            live.request.finish(reason)
        else:
            self.scheduler.abort(live.request, reason)

    def _end_request(self, request: Request, error: RpcError) -> None:
        """Ends a request and tells its client why; does nothing if it has ended."""
        self._deliver()
        if (live := self._live.get(request.request_id)) is not None:
            self._stop(live, FinishReason.ERROR)
            self._end(live, error)
            self._wake()

    def abort(self, live: LiveRequest) -> None:
        """Ends a request of which nobody wants to hear any more; does nothing if it has ended."""
        if live.request.request_id in self._live:
            if not live.request.is_finished:
                self._stop(live)
            self._close(live)
            self._wake()

    def abort_external(self, external_ids: set[str], tenant: str | None = None) -> int:
        """Ends requests of a tenant, None: of all, by their client-given ids and tells their clients; how many."""
        self._deliver()
        found = [live for live in self._live.values() if live.goes_by(external_ids, tenant)]
        for live in found:
            self._stop(live)
            self._end(live)
        self._wake()
        return len(found)

    def _expire(self, request_id: int) -> None:
        """A request's time is up: its place and its blocks are free at once."""
        self._deliver()
        if (live := self._live.get(request_id)) is not None:
            self._end_request(live.request, expired(live))

    @property
    def info(self) -> ExecutorInfo | None:
        """The present or the last executor; None before the first."""
        return self._info

    async def wait_for_model(self) -> ExecutorInfo:
        """What is served. Raises RpcError UNAVAILABLE if no executor comes within recovery_timeout."""
        while self._info is None:
            if not self._is_available:
                raise self._unavailable()
            self._changed.clear()
            await self._changed.wait()
        return self._info

    async def drained(self) -> None:
        """Returns when no request is live."""
        await self._idle.wait()

    # -- the executors -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until cancelled."""
        self._start_watchdog()
        try:
            async with asyncio.TaskGroup() as tasks:
                for driver in self._drivers:
                    tasks.create_task(driver.run())
        finally:
            self._stop_watchdog()
            self._expiry.stop()
            self.rollout.stop()

    def _wake(self) -> None:
        for driver in self._drivers:
            driver.wake()

    def before_step(self) -> None:
        self._expiry.check()

    def on_step(self, step: ScheduledStep) -> list[str]:
        """Notes whose turn has come; returns their trace contexts."""
        now = time.monotonic()
        traceparents = []
        for request in step.admitted:
            live = self._live[request.request_id]
            if live.first_step_time is None:
                live.first_step_time = now
                stats.QUEUE_TIME.observe(now - live.arrival_time)
                stats.PROMPT_TOKENS.inc(request.num_prompt_tokens)
                stats.PROMPT_RATE.add(request.num_prompt_tokens)
                self._entrance.on_first_step(live, now)
                live.span.end()
                live.span = telemetry.Span("scheduler.run", live.traceparent)
            traceparents.append(live.span.traceparent)
        if len(self._drivers) > 1 and self.scheduler.num_waiting:
            self._wake()  # who waits now may be another replica's to take
        return traceparents

    def weights_wanted(self, present: Weights) -> Weights:
        return self.rollout.wanted(present)

    def on_attached(self, replica: Replica, info: ExecutorInfo) -> None:
        info = info.within_steps_of(self._config.max_num_batched_tokens)
        try:
            ended = self.scheduler.attach(replica, info)
        except NotInterchangeable as difference:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, str(difference)) from difference
        logger.info(
            "executor %016x at %s serves %s: %d KV blocks, %d rows, %d tokens per step",
            *(info.incarnation, self._address(replica), info.model, info.num_blocks),
            *(info.max_num_seqs, info.max_num_batched_tokens),
        )
        self._stop_watchdog()
        self._set_available(True)
        for request, error in ended:
            status = self._entrance.status_of(error) if error else None
            self._end(self._live[request.request_id], status)
        self._note_info()
        self.rollout.on_attached()
        self._wake()

    def _note_info(self) -> None:
        """Tells clients if the model that is served, or how long its requests may be, has changed."""
        info = self.scheduler.info
        if info is None:
            return  # what the last executor could do still holds for those who wait for the next
        is_other_model = self._info is not None and convert.from_info(self._info) != convert.from_info(info)
        self._info = info
        if is_other_model:
            for notify in self.on_model_change:
                notify()

    def on_result(self, replica: Replica, result: StepResult, clock: StepClock, seconds: float) -> None:
        self._deliver()
        self._undelivered = outputs = self.scheduler.update(replica, result, seconds)
        # The sender wakes first: the device gets its next step before anybody is told about this one. Another replica
        # may be the one to take who waits, now that this one runs somebody less.
        if self.scheduler.num_waiting:
            self._wake()
        else:
            self._drivers[replica.replica_id].wake()
        asyncio.get_running_loop().call_soon(self._deliver)
        if self.rollout.is_under_way:
            self.rollout.notify()
        self._stats.on_result(len(outputs.token_ids), clock)
        self._entrance.admission.on_tokens(len(outputs.token_ids))

    def on_lost(self, replica: Replica, reason: str) -> None:
        is_loss = reason != GOES_OVER  # else it is back at once
        if is_loss:
            logger.warning(
                "lost the executor at %s (%s); its %d requests go on elsewhere or when it is back, %d are waiting",
                *(self._address(replica), reason, replica.num_running, self.scheduler.num_waiting),
            )
            stats.RECOVERIES.inc()
        self._deliver()
        loss = loss_of(reason)
        for request in self.scheduler.detach(replica, loss):
            stats.CONDEMNED.labels(loss).inc()
            self._end(self._live[request.request_id], condemned(request.num_losses, reason))
        self._stats.refresh()
        self._note_info()
        self.rollout.notify()
        self.rollout.watch_stranded(list(self.scheduler.waiting))
        if self.scheduler.info is None:
            if is_loss:
                self.availability.put_nowait(False)
            self._start_watchdog()
        self._wake()

    def _address(self, replica: Replica) -> str:
        return self._config.executor_addresses[replica.replica_id]

    def _start_watchdog(self) -> None:
        self._stop_watchdog()
        loop = asyncio.get_running_loop()
        self._watchdog = loop.call_later(self._config.recovery_timeout, self._give_up)

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _give_up(self) -> None:
        """No executor came in time: ends all requests and refuses new ones until one comes."""
        error = self._unavailable()
        logger.error("%s; ending %d requests", error.message, len(self._live))
        self._set_available(False)
        self._deliver()
        for live in list(self._live.values()):
            self._stop(live, FinishReason.ERROR)
            self._end(live, error)

    def _set_available(self, is_available: bool) -> None:
        self._is_available = is_available
        self.availability.put_nowait(is_available)
        self._changed.set()

    def _unavailable(self) -> RpcError:
        return RpcError(
            grpc.StatusCode.UNAVAILABLE,
            f"no executor at {self._config.executor_address} for {self._config.recovery_timeout:g} s; start it, or "
            "check --executor-address",
        )

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Tells of the latest result, unless that is done. Whoever ends requests calls it first: their last tokens are
        counted already."""
        if self._undelivered is None:
            return
        outputs, self._undelivered = self._undelivered, None
        now = time.monotonic()
        end = 0
        for i, (request, num_tokens) in enumerate(zip(outputs.requests, outputs.num_tokens, strict=True)):
            start, end = end, end + num_tokens
            live = self._live.get(request.request_id)
            if live is None:
                continue  # aborted since
            if live.first_token_time is None and live.first_step_time is not None:
                live.first_token_time = now
                stats.PREFILL_TIME.observe(now - live.first_step_time)
                self._entrance.on_first_token(live, now)
                output = RequestOutput.of(request, outputs.token_ids[start:end])
                output.weights_version = request.weights_version
            else:
                output = RequestOutput.of(request, outputs.token_ids[start:end])
            if outputs.logprobs and (logprobs := outputs.logprobs.get(i)) is not None:
                output.logprobs = [convert.first_logprobs(logprobs, num_tokens)]
            if outputs.prompt_logprobs:
                output.prompt_logprobs = outputs.prompt_logprobs.get(i)
            if outputs.vectors:
                output.vector = outputs.vectors.get(i)
            if output.is_last:
                self._close(live)
            pending = live.outbox.put(live.number, output)
            if pending is not output and not output.is_last:
                self._check_unread(live, pending)
        for request, error in outputs.refused:
            if (live := self._live.get(request.request_id)) is not None:
                self._end(live, RpcError.from_message(error))

    def _check_unread(self, live: LiveRequest, pending: RequestOutput) -> None:
        """Ends a request whose client does not read, or whose client's requests have too much unread together."""
        if live.max_unread is not None and pending.unread > live.max_unread:
            unread = f"this request's output: more than {live.max_unread} tokens and log probabilities wait"
        elif live.outbox.num_merged > MAX_UNREAD_OF_STREAM:
            unread = f"its stream: more than {MAX_UNREAD_OF_STREAM} tokens and log probabilities wait"
        else:
            return
        self.scheduler.abort(live.request, FinishReason.ERROR)
        self._wake()
        message = f"the client has not read {unread}; read faster"
        self._end(live, RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message))

    def _end(self, live: LiveRequest, error: RpcError | None = None) -> None:
        """Tells a client that its request, which the scheduler has let go, is over."""
        output = RequestOutput.of(live.request, [])
        output.error = error
        self._close(live, error)
        live.outbox.put(live.number, output)

    def _close(self, live: LiveRequest, error: RpcError | None = None) -> None:
        request = live.request
        del self._live[request.request_id]
        self._expiry.remove(request.request_id)
        if not self._live:
            self._idle.set()
        assert request.finish_reason is not None
        self._stats.on_end(request.finish_reason)
        self._entrance.on_end(live)
        logger.debug(
            "ended (%s) after %d prompt and %d output tokens, %d preemptions%s",
            *(request.finish_reason.name.lower(), request.num_prompt_tokens, request.num_output_tokens),
            *(request.num_preemptions, f": {error.message}" if error else ""),
            extra={"request_id": live.external_id or request.request_id},
        )
        if live.first_step_time is not None:
            stats.INFERENCE_TIME.observe(time.monotonic() - live.first_step_time)
        if telemetry.tracing():
            attributes = {
                "pagewire.prompt_tokens": request.num_prompt_tokens,
                "pagewire.cached_tokens": request.num_cached_tokens or 0,
                "pagewire.output_tokens": request.num_output_tokens,
                "pagewire.preemptions": request.num_preemptions,
                "pagewire.finish_reason": request.finish_reason.name.lower(),
            }
            live.span.end(attributes, error=error.message if error else None)
