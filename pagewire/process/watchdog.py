"""Ends processes that make no progress: a hang is a failure.

The event loop of a process, and everything else in it that must keep running, gives signs of life through a `Pulse`. A
thread of the process (`Watchdog`) ends the process if one of them stops. A process that is stopped as a whole (SIGSTOP)
cannot do that: the supervisor, to which its event loop sends a byte every second, kills it, and its left-hand neighbor
stops waiting for it (`streams/pings.py`).

An event loop that computes in Python may come to an end: it has BUSY_PATIENCE times as long, and its stack is logged.
While it is in a library that does not let other threads run, the watchdog does not run either, and the supervisor's
time counts.

Each watcher measures silence by counting its own steps. Time in which the watcher did not run either, because a laptop
was suspended or the whole stack was stopped, therefore does not count.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # of the event loop
# How many times as long a thread may be silent that computes all the time.
BUSY_PATIENCE = 3
_BUSY = 0.5  # the part of a step that such a thread has the processor at least
_FRAMES = 20  # of its stack, in the log
# The exit code of a process that its watchdog ended. Unlike after a wrong flag, the next start may well succeed.
HUNG = 70
# Set by a supervisor for its children: a file descriptor that takes a byte for every beat.
HEARTBEAT_FD = "PAGEWIRE_HEARTBEAT_FD"
# A supervisor waits this much longer than the process itself, which can log where it hangs.
SUPERVISOR_MARGIN_S = 1.0

T = TypeVar("T")


class Silence:
    """The time without a sign of life, in steps of the watcher."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.step = min(0.5, timeout / 4)  # seconds between checks
        self.seconds = 0.0  # of silence so far

    def broken(self) -> None:
        """Records a sign of life."""
        self.seconds = 0.0

    def lasts(self, expected: float = 0.0, part: float = 1.0) -> bool:
        """Counts a step, or a part of it, and returns whether the silence is too long.

        expected: further seconds of silence to allow.
        """
        self.seconds += part * self.step
        return self.seconds > self.timeout + expected


class Pulse:
    """The signs of life of something that must keep running. Any thread may give them."""

    def __init__(self, name: str, timeout: float, thread: int | None = None) -> None:
        """thread: the identifier of the thread that gives the signs, if it may be busy for long."""
        self.name = name
        self.thread = thread
        self.is_busy = False  # the thread computed in the latest step
        self.is_logged = False  # what the thread is busy with, in this silence
        self._silence = Silence(timeout)
        self._expected: float | None = None
        self._work = None if thread is None else ThreadWork(thread)

    def beat(self, within: float | None) -> None:
        """Gives a sign of life. within: seconds until the next one is expected; None: none is expected."""
        self._expected = within
        self.is_logged = False
        self._silence.broken()

    def has_stopped(self) -> bool:
        """Counts a step of the watcher, and returns whether signs of life have stopped."""
        if self._work is not None:
            self.is_busy = self._work.since_last() > _BUSY * self._silence.step
        part = 1 / BUSY_PATIENCE if self.is_busy else 1.0
        return self._expected is not None and self._silence.lasts(self._expected, part)

    @property
    def is_late(self) -> bool:
        """True if a sign of life is overdue."""
        return (
            self._expected is not None and self._silence.seconds > self._expected / BUSY_PATIENCE + self._silence.step
        )


class ThreadWork:
    """The time in which a thread computes, or would if it had a processor."""

    def __init__(self, thread: int) -> None:
        """thread: the identifier of a thread of this process."""
        native = next((one.native_id for one in threading.enumerate() if one.ident == thread), None)
        self._statistics = Path(f"/proc/self/task/{native}/schedstat")
        self._clock = time.pthread_getcpuclockid(thread) if hasattr(time, "pthread_getcpuclockid") else None
        self._seconds = self._total()

    def since_last(self) -> float:
        """Returns the seconds since the previous call."""
        before, self._seconds = self._seconds, self._total()
        return self._seconds - before

    def _total(self) -> float:
        try:  # nanoseconds with a processor, and waiting for one
            computed, waited, _ = self._statistics.read_text().split()
            return (int(computed) + int(waited)) / 1e9
        except (OSError, ValueError):  # not Linux, or a kernel that does not count
            return time.clock_gettime(self._clock) if self._clock is not None else 0.0


class Watchdog:
    """A thread that ends the process when a pulse has stopped; its supervisor, or its container's, restarts it."""

    def __init__(
        self,
        hang_timeout: float,
        end: Callable[[str], None] | None = None,
        on_busy: Callable[[], None] = lambda: None,
    ) -> None:
        """hang_timeout: seconds of silence beyond the expected time; 0: no watching. end: replaces `end_process`.
        on_busy: called in each step in which a silent thread computes."""
        self._timeout = hang_timeout
        self._end = end or end_process
        self._on_busy = on_busy
        self._pulses: list[Pulse] = []
        self._stop = threading.Event()

    def pulse(self, name: str, thread: int | None = None) -> Pulse:
        """Returns a pulse that is watched from its first beat on. name: for the log. thread: as for `Pulse`."""
        pulse = Pulse(name, self._timeout or 1.0, thread)
        self._pulses.append(pulse)
        return pulse

    def start(self) -> None:
        if self._timeout:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(Silence(self._timeout).step):
            for pulse in self._pulses:
                if pulse.has_stopped():
                    self._end(
                        f"no progress: {pulse.name} has hung for more than {self._timeout:g} s (--hang-timeout); "
                        "the process ends, and a supervisor restarts it"
                    )
                    return
                if pulse.is_busy and pulse.is_late:
                    self._on_busy()
                    _log_work(pulse)


def _log_work(pulse: Pulse) -> None:
    """Logs the stack of a busy thread, once in a silence."""
    if pulse.is_logged or pulse.thread is None:
        return
    pulse.is_logged = True
    if (frame := sys._current_frames().get(pulse.thread)) is not None:
        stack = "".join(traceback.format_stack(frame, limit=_FRAMES))
        _log(logging.WARNING, f"{pulse.name} is busy, and everything else waits for it:\n{stack.rstrip()}")


def _log(level: int, message: str) -> None:
    """Logs in a thread of its own: a thread that hangs may hold a lock that logging needs."""
    logging_it = threading.Thread(target=logger.log, args=(level, "%s", message), daemon=True)
    logging_it.start()
    logging_it.join(0.5)


_before_end: list[Callable[[], None]] = []


def call_before_end(function: Callable[[], None]) -> None:
    """Has the watchdog call `function` in its own thread before it ends this process."""
    _before_end.append(function)


def do_not_call(function: Callable[[], None]) -> None:
    """Reverses call_before_end()."""
    _before_end.remove(function)


def end_process(message: str) -> None:
    """Ends the process at once, and logs the stacks of all threads."""
    for function in _before_end:
        function()
    _log(logging.CRITICAL, message)
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(HUNG)


async def watched(main: Awaitable[T], hang_timeout: float) -> T:
    """Runs `main` while this event loop gives signs of life to a watchdog and to the supervisor, if there is one."""
    if sys.stderr is not None:
        faulthandler.enable()  # a supervisor has the stacks logged, by SIGABRT
    given = os.environ.pop(HEARTBEAT_FD, None)
    descriptor = None if given is None else int(given)
    if descriptor is not None:
        os.set_inheritable(descriptor, False)
        os.set_blocking(descriptor, False)

    def send_beat() -> None:
        if descriptor is not None:
            _send(descriptor)

    watchdog = Watchdog(hang_timeout, on_busy=send_beat)
    pulse = watchdog.pulse("the event loop", threading.get_ident())

    async def beat() -> None:
        while True:
            pulse.beat(BEAT_S)
            send_beat()
            await asyncio.sleep(BEAT_S)

    beating = asyncio.create_task(beat(), name="heartbeat")
    watchdog.start()
    try:
        return await main
    finally:
        watchdog.stop()
        beating.cancel()


def _send(descriptor: int) -> None:
    try:
        os.write(descriptor, b".")
    except OSError:
        pass  # the supervisor is stopped and has not read for hours, or is about to end this process
