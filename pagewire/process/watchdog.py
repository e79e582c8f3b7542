"""A hang is a failure: what ends a process that makes no progress.

A process that works gives signs of life: its event loop, and whatever else has to go on, each through a `Pulse`. A
thread of the process (`Watchdog`) ends it if one stays away. Who is stopped as a whole (SIGSTOP) cannot do that: such a
process is killed by the supervisor, which its event loop sends a byte every second, and its left-hand neighbour stops
waiting for it (`streams/pings.py`).

All of them count a silence in steps of their own, each as long as a step is meant to be. So time in which the watcher
did not run either, as that of a suspended laptop or of a stack that was stopped as a whole, is nobody's silence.
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
# A supervisor waits for so much longer than the process itself, which can say where it hangs.
SUPERVISOR_MARGIN_S = 1.0

T = TypeVar("T")


class Silence:
    """How long a watcher has heard nothing, in seconds of its own."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.step = min(0.5, timeout / 4)  # seconds between looks
        self._seconds = 0.0

    def broken(self) -> None:
        """There was a sign of life."""
        self._seconds = 0.0

    def lasts(self, expected: float = 0.0) -> bool:
        """To be called once a step: whether it has lasted for longer than it may. expected: seconds that it may be
        silent anyway."""
        self._seconds += self.step
        return self._seconds > self.timeout + expected


class Pulse:
    """Something that has to go on and gives signs of life. Any thread may."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self._silence = Silence(timeout)
        self._expected: float | None = None

    def beat(self, within: float | None) -> None:
        """A sign of life. within: seconds in which the next is expected; None: there need be none."""
        self._expected = within
        self._silence.broken()

    def has_stopped(self) -> bool:
        """To be called once a step of the watcher."""
        return self._expected is not None and self._silence.lasts(self._expected)


class Watchdog:
    """A thread that ends the process when a pulse has stopped: its supervisor, or the container's, starts another."""

    def __init__(self, hang_timeout: float, end: Callable[[str], None] | None = None) -> None:
        """hang_timeout: seconds of silence beyond what was expected; 0 = watch nothing. end: instead of exiting."""
        self._timeout = hang_timeout
        self._end = end or end_process
        self._pulses: list[Pulse] = []
        self._stop = threading.Event()

    def pulse(self, name: str) -> Pulse:
        """Something to watch, from its first beat on; name is for the log."""
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
                        "ending, so that a supervisor starts anew"
                    )
                    return


def end_process(message: str) -> None:
    """At once, with the stacks of all threads in the log."""
    # Whoever hangs may hold a lock that logging needs.
    log = threading.Thread(target=logger.critical, args=("%s", message), daemon=True)
    log.start()
    log.join(0.5)
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(1)


async def watched(main: Awaitable[T], hang_timeout: float) -> T:
    """Runs `main` while this event loop gives signs of life: to a watchdog, and to the supervisor if there is one."""
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
        pass  # the supervisor is stopped and has not read for hours, or is about to end us
