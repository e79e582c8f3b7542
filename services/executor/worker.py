"""The device thread: loads the model, then executes steps strictly in order.

asyncio never waits for the device: it puts steps into a queue and gets results through callbacks. On CUDA the device
thread only launches, so step N + 1 is launched while N runs; a second thread waits for results. On the CPU a step is
done when `execute()` returns, and there is no second thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from pagewire.services.executor import convert, stats
from pagewire.services.executor.model_runner import ModelRunner
from pagewire.services.executor.startup import ExecutorInfo
from pagewire.services.executor.step import InvalidStep, Step, StepOutput
from pagewire.services.executor.step_watch import IMAGES_S, INSTALL_S, StepWatch
from pagewire.v1 import executor_pb2
from pagewire.watchdog import Pulse

logger = logging.getLogger(__name__)

# Called on the worker's threads with each result in step order, then once with how the session ended: an error, or
# None when it was closed.
Deliver = Callable[[executor_pb2.StepResult | Exception | None], None]


class DeviceError(RuntimeError):
    """The device thread failed in a way that leaves the device in an unknown state."""


@dataclass(eq=False)
class Session:
    """One Execute stream. Opening one ends the one before and empties all rows."""

    deliver: Deliver
    last_step_id: int = 0
    last_clock: Clock | None = None  # of the last step that was returned


@dataclass(frozen=True)
class _Opened:
    session: Session


@dataclass(frozen=True)
class _Closed:
    session: Session
    error: Exception | None = None


@dataclass(frozen=True)
class _Submitted:
    session: Session
    step: Step
    received_ns: int = field(default_factory=time.perf_counter_ns)


@dataclass(frozen=True)
class _Called:
    function: Callable[[ModelRunner], None]
    reason: str  # for the end of the session
    done: Future[None] = field(default_factory=Future)


_Item = _Opened | _Submitted | _Closed | _Called


@dataclass(frozen=True)
class _Launched:
    session: Session
    output: StepOutput
    kind: str
    num_requests: int
    clock: Clock


class Clock:
    """Times of one step; all but the start are known once it was waited for."""

    def __init__(self, on_cuda: bool, received_ns: int) -> None:
        self._received_ns = received_ns
        self._started_ns = self._ended_ns = time.perf_counter_ns()
        self.queue_ns = self._started_ns - received_ns
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if on_cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True))
        self._is_launching = False

    def launching(self) -> None:
        """The host has prepared the step: from here on the device works on it. On a CPU the preparation is its work."""
        self._is_launching = True
        if self._events is not None:
            self._events[0].record()

    def launched(self) -> None:
        if not self._is_launching:
            self.launching()  # a step that only frees rows
        if self._events is not None:
            self._events[1].record()

    def wait_ns(self) -> int:
        """Waits until the device is done with the step."""
        if self._events is None:
            self._ended_ns = time.perf_counter_ns()
            return self._ended_ns - self._started_ns
        start, end = self._events
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)

    def idle_ns(self, previous: Clock) -> int:
        """How long the device had nothing to do between the end of the step before and this one."""
        if self._events is None or previous._events is None:
            return max(0, self._received_ns - previous._ended_ns)
        return max(0, int(previous._events[1].elapsed_time(self._events[0]) * 1e6))


class Worker:
    """Owns the device thread. `loaded` resolves when steps can be executed, `failed` with a fatal device error."""

    def __init__(
        self, start_runner: Callable[[], tuple[ModelRunner, ExecutorInfo]], *, on_cuda: bool, pulse: Pulse | None = None
    ) -> None:
        """start_runner is called on the device thread; its errors go to `loaded`. pulse: of the steps, from the first
        that is done on."""
        self._watch = StepWatch(pulse or Pulse("nobody watches", 1.0))
        self._start_runner = start_runner
        self._on_cuda = on_cuda
        self._submitted: SimpleQueue[_Item | None] = SimpleQueue()
        self._launched: SimpleQueue[_Launched | _Closed | None] = SimpleQueue()
        self._session: Session | None = None  # of the device thread
        self._num_requests = 0  # with a row
        self._runner: ModelRunner | None = None
        self._spans = stats.RequestSpans()
        self.loaded: Future[ExecutorInfo] = Future()
        self.failed: Future[None] = Future()
        # Daemons: a device that hangs must not keep the process from ending.
        self._threads = [threading.Thread(target=self._run, name="device", daemon=True)]
        if on_cuda:
            self._threads.append(threading.Thread(target=self._return_results, name="results", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the threads after the steps that were submitted; does not wait for a model that is still loading."""
        self._submitted.put(None)
        if self.loaded.done():
            for thread in self._threads:
                thread.join(timeout)

    def open(self, deliver: Deliver) -> Session:
        """A new session; steps of older ones that were not executed yet never will be."""
        session = Session(deliver)
        self._submitted.put(_Opened(session))
        return session

    def submit(self, session: Session, step: Step) -> None:
        self._submitted.put(_Submitted(session, step))

    def close(self, session: Session) -> None:
        """No more steps: those submitted are executed, then the session's rows are freed."""
        self._submitted.put(_Closed(session))

    @property
    def is_idle(self) -> bool:
        """Whether no request has a row and no step waits. May be asked on any thread."""
        return not self._num_requests and self._submitted.empty()

    def between_steps(self, function: Callable[[ModelRunner], None], reason: str) -> Future[None]:
        """Has the device thread call a function that leaves rows and KV cache void: the session ends before. An error
        in it is one of the device."""
        called = _Called(function, reason)
        self._submitted.put(called)
        return called.done

    @property
    def runner(self) -> ModelRunner:
        """Once it is `loaded`; to look at."""
        assert self._runner is not None
        return self._runner

    def _run(self) -> None:
        try:
            runner, info = self._start_runner()
        except BaseException as error:
            self.loaded.set_exception(error)
        else:
            self._runner = runner
            self.loaded.set_result(info)
            self._serve(runner)
        self._launched.put(None)

    def _serve(self, runner: ModelRunner) -> None:
        try:
            while (item := self._submitted.get()) is not None:
                self._watch.begin(_allowance(item, runner))
                self._handle(runner, item)
                self._watch.end()
        except BaseException as error:
            self._fail(error)
        self._end_session(None, "the executor stops")

    def _handle(self, runner: ModelRunner, item: _Item) -> None:
        if isinstance(item, _Called):
            self._call(runner, item)
        elif isinstance(item, _Opened):
            self._end_session(item.session, "superseded by a new stream")
            runner.reset()
        elif item.session is not self._session:
            pass  # of a session that has ended
        elif isinstance(item, _Closed):
            self._end_session(None, "stream closed")
            runner.reset()
            self._hand_over(item)
        else:
            self._execute_or_end(runner, item)

    def _call(self, runner: ModelRunner, item: _Called) -> None:
        session = self._session
        self._end_session(None, item.reason)
        try:
            item.function(runner)
        except BaseException as error:
            item.done.set_exception(DeviceError(f"{type(error).__name__}: {error}"))
            self._session = session  # which hears of the error
            raise
        if session is not None:
            self._hand_over(_Closed(session))
        item.done.set_result(None)

    def _execute_or_end(self, runner: ModelRunner, item: _Submitted) -> None:
        try:
            self._hand_over(self._execute(runner, item.session, item.step, item.received_ns))
        except InvalidStep as error:
            logger.error("step %d breaks the protocol: %s", item.step.step_id, error)
            self._end_session(None, str(error))
            runner.reset()
            self._hand_over(_Closed(item.session, error))

    def _hand_over(self, item: _Launched | _Closed) -> None:
        if self._on_cuda:
            self._launched.put(item)
        else:
            self._return(item)

    def _end_session(self, successor: Session | None, reason: str) -> None:
        self._spans.end_all(reason)
        self._session = successor
        self._num_requests = 0

    def _execute(self, runner: ModelRunner, session: Session, step: Step, received_ns: int) -> _Launched:
        if step.step_id != session.last_step_id + 1:
            raise InvalidStep(f"step {step.step_id} follows step {session.last_step_id}")
        session.last_step_id = step.step_id
        clock = Clock(self._on_cuda, received_ns)
        self._num_requests += len(step.new_requests)

        def launching(load: float) -> None:
            self._watch.launching(load)
            clock.launching()

        output = runner.execute(step, launching)
        clock.launched()
        self._watch.launched()
        self._spans.update(step)
        self._num_requests = runner.num_requests
        return _Launched(session, output, stats.step_kind(step), self._num_requests, clock)

    def _return_results(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                self._return(launched)
        except BaseException as error:
            self._fail(error)

    def _return(self, item: _Launched | _Closed) -> None:
        """Waits for what was launched and delivers it."""
        if isinstance(item, _Closed):
            item.session.deliver(item.error)
            return
        clock, session = item.clock, item.session
        execute_ns = clock.wait_ns()
        self._watch.done(execute_ns / 1e9)
        idle_ns = None if session.last_clock is None else clock.idle_ns(session.last_clock)
        session.last_clock = clock
        tokens = item.output.wait()
        session.deliver(convert.result_to_proto(item.output, tokens, execute_ns, clock.queue_ns, idle_ns))
        stats.record_step(item.kind, item.output.num_tokens, item.num_requests, execute_ns, clock.queue_ns)

    def _fail(self, cause: BaseException) -> None:
        """The device is in an unknown state: the stream ends with the error and the process is to be restarted."""
        logger.critical("fatal error on the device thread", exc_info=cause)
        error = DeviceError(f"fatal device error: {type(cause).__name__}: {cause}")
        session = self._session
        if session is not None:
            session.deliver(error)
        if not self.failed.done():
            self.failed.set_exception(error)


def _allowance(item: _Item, runner: ModelRunner) -> float:
    """Seconds that it may take to handle, apart from a step."""
    if isinstance(item, _Called):
        return INSTALL_S
    return IMAGES_S if runner.smallest_image > 0 else 0.0
