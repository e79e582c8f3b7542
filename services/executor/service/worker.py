"""The device thread: loads the model, then executes steps strictly in order.

asyncio never waits for the device: it puts steps into a queue and gets results through callbacks. On CUDA the device
thread only launches, so step N + 1 is launched while N runs; a second thread waits for results. On the CPU a step is
done when `execute()` returns, and there is no second thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import grpc

from pagewire.process.watchdog import Pulse
from pagewire.services.executor import stats
from pagewire.services.executor.device.clock import Clock
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.probe import probe
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.service import convert
from pagewire.services.executor.service.failure_watch import OnlyNan
from pagewire.services.executor.service.idle_recording import QUIET_S, IdleRecording
from pagewire.services.executor.service.session import Deliver, Session, StepFailed
from pagewire.services.executor.service.step_watch import IMAGES_S, INSTALL_S, RECORDING_S, StepWatch
from pagewire.services.executor.service.work import (
    NO_OBSERVER,
    Called,
    Closed,
    Failed,
    Item,
    Launched,
    Opened,
    Submitted,
    WorkObserver,
)
from pagewire.services.executor.step.step import InvalidStep, Step

logger = logging.getLogger(__name__)


class Worker:
    """Owns the device thread. `loaded` resolves when steps can be executed, `failed` with a fatal device error."""

    def __init__(
        self,
        start_runner: Callable[[], tuple[Runner, ExecutorInfo]],
        *,
        on_cuda: bool,
        pulse: Pulse | None = None,
        quiet: float = QUIET_S,
        observer: WorkObserver = NO_OBSERVER,
    ) -> None:
        """start_runner is called on the device thread; its errors go to `loaded`. pulse: signs of life, from the first
        finished step on. quiet: seconds without a request after which steps are recorded. observer: observes the
        queue of work."""
        self._observer = observer
        self._watch = StepWatch(pulse or Pulse("no watchdog", 1.0))
        self._start_runner = start_runner
        self._on_cuda = on_cuda
        self.quiet = quiet
        self._submitted: SimpleQueue[Item | None] = SimpleQueue()
        self._launched: SimpleQueue[Launched | Closed | None] = SimpleQueue()
        self._session: Session | None = None  # used by the device thread
        self._num_requests = 0  # with a row
        self._runner: Runner | None = None
        self._spans = stats.RequestSpans()
        self.is_ending = False  # whether the process is about to end
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
        """Opens a new session; the remaining steps of older ones are never executed."""
        session = Session(deliver)
        self._put(Opened(session))
        return session

    def submit(self, session: Session, step: Step) -> None:
        self._put(Submitted(session, step))

    def close(self, session: Session) -> None:
        """Ends the steps: the submitted ones are executed, then the session's rows are freed."""
        self._put(Closed(session))

    def end_stream(self, error: DeviceError) -> None:
        """Ends the scheduler's stream with this error; no other stream can be opened. Called on any thread."""
        self.is_ending = True
        session = self._session
        if session is not None:
            session.deliver(error)

    @property
    def is_idle(self) -> bool:
        """True if no request has a row and no step waits. Read on any thread."""
        return not self._num_requests and self._submitted.empty()

    def between_steps(
        self, function: Callable[[Runner], None], reason: str, within: float | None = INSTALL_S
    ) -> Future[None]:
        """Calls a function on the device thread that makes rows and KV cache void; the session ends before. An error in
        it counts as a device error, and so does a hang of `within` seconds."""
        called = Called(function, reason, within)
        self._put(called)
        return called.done

    def _put(self, item: Item) -> None:
        self._observer.arrived(item, self._submitted.put)

    @property
    def runner(self) -> Runner:
        """The runner, once the worker is `loaded`, to be read only."""
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

    def _serve(self, runner: Runner) -> None:
        recording = IdleRecording(runner)
        try:
            while (item := self._next(recording)) is not None:
                self._watch.begin(_allowance(item, runner))
                self._observer.begins(item)
                self._handle(runner, item)
                self._observer.ended(item)
                self._watch.end()
                if isinstance(item, Called):
                    recording = IdleRecording(runner)  # it may have made records void
        except BaseException as error:
            self.fail(error)
        self._end_session(None, "the executor stops")

    def _next(self, recording: IdleRecording) -> Item | None:
        """Waits for work; records steps while no request has a row."""
        while not (self._num_requests or recording.is_done):
            try:
                return self._submitted.get(timeout=self.quiet)
            except Empty:
                self._watch.begin(RECORDING_S)
                recording.record_next()
                self._watch.end()
        return self._submitted.get()

    def _handle(self, runner: Runner, item: Item) -> None:
        if isinstance(item, Called):
            self._call(runner, item)
        elif isinstance(item, Opened):
            self._end_session(item.session, "superseded by a new stream")
            runner.reset()
        elif item.session is not self._session:
            pass  # of a session that has ended
        elif isinstance(item, Closed):
            self._end_session(None, "stream closed")
            runner.reset()
            self._hand_over(item)
        elif isinstance(item, Failed):
            self._recover(runner, item.session, item.error)
        else:
            self._execute_or_end(runner, item)

    def _call(self, runner: Runner, item: Called) -> None:
        session = self._session
        self._end_session(None, item.reason)
        try:
            item.function(runner)
        except BaseException as error:
            item.done.set_exception(DeviceError(f"{type(error).__name__}: {error}"))
            self._session = session  # receives the error
            raise
        if session is not None:
            self._hand_over(Closed(session))
        item.done.set_result(None)

    def _execute_or_end(self, runner: Runner, item: Submitted) -> None:
        try:
            self._hand_over(self._execute(runner, item.session, item.step, item.received_ns))
        except InvalidStep as error:
            logger.error("step %d is invalid: %s", item.step.step_id, error)
            self._end_session(None, str(error))
            runner.reset()
            self._hand_over(Closed(item.session, error))
        except DeviceError:
            raise
        except Exception as error:
            self._recover(runner, item.session, error)

    def _recover(self, runner: Runner, session: Session, error: Exception) -> None:
        """Ends a session after an error that a request may have caused, and continues. Raises the error if the device
        or the model is the cause."""
        logger.error("a step failed", exc_info=error)
        if self._observer.is_strict or isinstance(error, DeviceError):
            raise error  # later steps are already running, or would be wrong
        try:
            probe(runner, self.loaded.result().vocab_size)
        except DeviceError:
            raise
        except Exception as device_error:
            raise error from device_error
        stats.FAILED_STEPS.inc()
        self._end_session(None, str(error))
        self._hand_over(Closed(session, StepFailed(f"a step failed: {type(error).__name__}: {error}")))

    def _hand_over(self, item: Launched | Closed) -> None:
        if self._on_cuda:
            self._launched.put(item)
        else:
            self._return(item)

    def _end_session(self, successor: Session | None, reason: str) -> None:
        self._spans.end_all(reason)
        self._session = successor
        self._num_requests = 0

    def _execute(self, runner: Runner, session: Session, step: Step, received_ns: int) -> Launched:
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
        return Launched(session, output, stats.step_kind(step), self._num_requests, clock)

    def _return_results(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                try:
                    self._return(launched)
                except Exception as error:
                    self._report_failure(launched.session, error)
        except BaseException as error:
            self.fail(error)

    def _report_failure(self, session: Session, error: Exception) -> None:
        """Lets the device thread find out what failed: a request, the model or the device."""
        session.is_over = True
        self._submitted.put(Failed(session, error))

    def _return(self, item: Launched | Closed) -> None:
        """Waits for launched steps and delivers their results."""
        if isinstance(item, Closed):
            item.session.deliver(item.error)
            return
        clock, session = item.clock, item.session
        execute_ns = clock.wait_ns()
        self._watch.done(execute_ns / 1e9)
        idle_ns = None if session.last_clock is None else clock.idle_ns(session.last_clock)
        if (stages := item.output.stages) is not None:
            execute_ns, idle_ns = max(stages.busy), None if idle_ns is None else stages.late
            stats.record_stages(stages)
        session.last_clock = clock
        tokens = item.output.wait()
        if session.is_over:
            return
        if session.failures.suspects_model(len(item.output.request_ids), {**item.output.failures, **tokens.failures}):
            self._report_failure(session, OnlyNan("all requests of the step yielded NaN for their next token"))
            return
        stats.record_drafts(tokens)
        stats.record_step(item.kind, item.output.num_tokens, item.num_requests, execute_ns, clock.queue_ns)
        # Last: this thread then waits for work, and the event loop need not wait for its turn in the interpreter.
        session.deliver(convert.result_to_proto(item.output, tokens, execute_ns, clock.queue_ns, idle_ns))

    def fail(self, cause: BaseException) -> None:
        """Ends the stream with an error after which the process has to restart. Called on any thread; the first cause
        counts."""
        if self.is_ending:
            return
        self.is_ending = True
        if isinstance(cause, DeviceError) and cause.code is not grpc.StatusCode.INTERNAL:
            error = cause
        else:
            error = DeviceError(f"fatal device error: {type(cause).__name__}: {cause}")
        # A DeviceError says it all without a traceback.
        logger.critical("%s", error, exc_info=None if isinstance(cause, DeviceError) else cause)
        self.end_stream(error)
        if not self.failed.done():
            self.failed.set_exception(error)


def _allowance(item: Item, runner: Runner) -> float | None:
    """Returns the seconds that the item may take in addition to a step; None: it has no limit."""
    if isinstance(item, Called):
        return item.within
    return IMAGES_S if runner.smallest_image > 0 else 0.0
