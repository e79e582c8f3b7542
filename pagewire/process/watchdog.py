"""Ends processes that make no progress: a hang is a failure.

The event loop of a process, and everything else in it that must keep running, gives signs of life through a `Pulse`. A
thread of the process (`Watchdog`) ends the process if one of them stops. A process that is stopped as a whole (SIGSTOP)
cannot do that: the supervisor, to which its event loop sends a byte every second, kills it, and its left-hand neighbor
stops waiting for it (`streams/pings.py`).

Each watcher measures silence by counting its own steps. Time in which the watcher did not run either, because a laptop
was suspended or the whole stack was stopped, therefore does not count.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # of the event loop
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
        self._seconds = 0.0

    def broken(self) -> None:
        """Records a sign of life."""
        self._seconds = 0.0

    def lasts(self, expected: float = 0.0) -> bool:
        """Counts a step, and returns whether the silence is too long. expected: further seconds of silence to allow."""
        self._seconds += self.step
        return self._seconds > self.timeout + expected


class Pulse:
    """The signs of life of something that must keep running. Any thread may give them."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self._silence = Silence(timeout)
        self._expected: float | None = None

    def beat(self, within: float | None) -> None:
        """Gives a sign of life. within: seconds until the next one is expected; None: none is expected."""
        self._expected = within
        self._silence.broken()

    def has_stopped(self) -> bool:
        """Counts a step of the watcher, and returns whether signs of life have stopped."""
        return self._expected is not None and self._silence.lasts(self._expected)


class Watchdog:
    """A thread that ends the process when a pulse has stopped; its supervisor, or its container's, restarts it."""

    def __init__(self, hang_timeout: float, end: Callable[[str], None] | None = None) -> None:
        """hang_timeout: seconds of silence beyond the expected time; 0: no watching. end: replaces `end_process`."""
        self._timeout = hang_timeout
        self._end = end or end_process
        self._pulses: list[Pulse] = []
        self._stop = threading.Event()

    def pulse(self, name: str) -> Pulse:
        """Returns a pulse that is watched from its first beat on. name: for the log."""
        pulse = Pulse(name, self._timeout or 1.0)
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


def end_process(message: str) -> None:
    """Ends the process at once, and logs the stacks of all threads."""
    # The thread that hangs may hold a lock that logging needs.
    log = threading.Thread(target=logger.critical, args=("%s", message), daemon=True)
    log.start()
    log.join(0.5)
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(1)


async def watched(main: Awaitable[T], hang_timeout: float) -> T:
    """Runs `main` while this event loop gives signs of life to a watchdog and to the supervisor, if there is one."""
    watchdog = Watchdog(hang_timeout)
    pulse = watchdog.pulse("the event loop")
    given = os.environ.pop(HEARTBEAT_FD, None)
    descriptor = None if given is None else int(given)
    if descriptor is not None:
        os.set_inheritable(descriptor, False)
        os.set_blocking(descriptor, False)

    async def beat() -> None:
        while True:
            pulse.beat(BEAT_S)
            if descriptor is not None:
                _send(descriptor)
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
