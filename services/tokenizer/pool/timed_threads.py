"""Threads that work through one queue. A job that takes too long is given up, together with its thread."""

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# Seconds in which a busy thread can end when the pool is closed.
_LAST_SECONDS = 0.5


class JobTooSlowError(RuntimeError):
    """A job took longer than its limit."""


class _GivenUp(BaseException):
    """Raised in the thread of a job that was given up, at the next Python instruction."""


class _Worker:
    """One thread and its job."""

    def __init__(self, jobs: "queue.SimpleQueue[_Job | None]", name: str) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._job: _Job | None = None
        self._started = 0.0
        self._is_given_up = False
        # A daemon: it may run code that cannot be interrupted, for which the process must not wait.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def give_up(self, overdue: float, error: Callable[[], Exception]) -> bool:
        """Ends its job with the error if that began before `overdue`, in time.monotonic().

        Returns whether it did; then the thread takes no other job.
        """
        with self._lock:
            job = self._job
            if job is None or self._started > overdue:
                return False
            self._is_given_up = True
        job.future.set_exception(error())
        # Interrupts Python code, such as a template, but no library.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(_GivenUp))
        return True

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if job.future.set_running_or_notify_cancel() and not self._do(job):
                    return
        except _GivenUp:
            pass

    def _do(self, job: "_Job") -> bool:
        """Returns whether the thread continues."""
        with self._lock:
            self._job, self._started = job, time.monotonic()
        result, error = None, None
        try:
            result = job.run()
        except Exception as raised:
            error = raised
        with self._lock:
            self._job = None
            if self._is_given_up:
                return False
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        return True


class _Job:
    __slots__ = ("future", "run")

    def __init__(self, run: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.run = run


class TimedThreads:
    """A pool of `size` threads. Jobs wait in order of arrival while all are busy."""

    def __init__(self, size: int, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers = [_Worker(self._jobs, name) for _ in range(size)]
        self._is_closed = False

    def submit(self, run: Callable[[], Any]) -> "Future[Any]":
        """Queues a job. run: raises Exceptions only. The future can be cancelled while the job waits."""
        if self._is_closed:
            raise RuntimeError(f"the {self._name} threads have ended")
        job = _Job(run)
        self._jobs.put(job)
        return job.future

    def give_up_slow(self, max_seconds: float, error: Callable[[], Exception]) -> None:
        """Ends jobs that have run for longer with the error, and replaces their threads."""
        overdue = time.monotonic() - max_seconds
        for index, worker in enumerate(self._workers):
            if worker.give_up(overdue, error):
                self._workers[index] = _Worker(self._jobs, self._name)

    def close(self) -> None:
        """Cancels jobs that wait, and gives running ones a moment to end."""
        self._is_closed = True
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job.future.cancel()
        for _ in self._workers:
            self._jobs.put(None)
        deadline = time.monotonic() + _LAST_SECONDS
        for worker in self._workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.give_up(time.monotonic(), lambda: JobTooSlowError(f"the {self._name} threads have ended"))
