"""The watchdog ends a process that hangs, and no other."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagewire.process.watchdog import BUSY_PATIENCE, HUNG, Pulse, Silence, ThreadWork, Watchdog

REPOSITORY = Path(__file__).parents[3]

HANGS = """
import asyncio, time
from pagewire.wire import rpc
async def block():
    await asyncio.sleep(0.1)
    time.sleep({seconds})
    print("done", flush=True)
rpc.run(block(), {timeout})
"""


def run(seconds: float, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HANGS.format(seconds=seconds, timeout=timeout)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def test_a_blocked_event_loop_ends_the_process_and_shows_where_it_is() -> None:
    ended = run(seconds=60, timeout=0.4)
    assert ended.returncode == HUNG and "done" not in ended.stdout
    assert "no progress: the event loop has hung for more than 0.4 s (--hang-timeout)" in ended.stderr
    assert "in block" in ended.stderr


def test_a_loop_that_is_busy_for_a_while_is_left_alone() -> None:
    assert run(seconds=0.5, timeout=5).stdout == "done\n"
    assert run(seconds=1.5, timeout=0).stdout == "done\n"


def test_time_that_the_watcher_missed_counts_against_no_process() -> None:
    silence = Silence(timeout=8)
    assert not silence.lasts(), "a look counts for one step, however late it comes"
    looks = 1
    while not silence.lasts():
        looks += 1
    assert looks * silence.step >= 8
    silence.broken()
    assert not silence.lasts()


def test_a_pulse_is_watched_for_as_long_as_it_is_to_beat() -> None:
    ended: list[str] = []
    has_ended = threading.Event()

    def end(message: str) -> None:
        ended.append(message)
        has_ended.set()

    watchdog = Watchdog(0.04, end)
    idle, slow, hung = (watchdog.pulse(name) for name in ("idle", "slow", "hung"))
    idle.beat(None)
    slow.beat(3600)  # a step that is expected to take an hour
    hung.beat(0)
    watchdog.start()
    assert has_ended.wait(30)
    assert "hung has hung" in ended[0]


@contextmanager
def computing() -> Iterator[int]:
    """The identifier of a thread that computes."""
    ends = threading.Event()

    def compute_here() -> None:
        while not ends.is_set():
            pass

    thread = threading.Thread(target=compute_here)
    thread.start()
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        ends.set()
        thread.join()


def steps_until_stopped(pulse: Pulse, thread: int, step: float) -> int:
    """The number of steps of a watcher, in each of which the thread has computed all the time."""
    clock = time.pthread_getcpuclockid(thread)
    for steps in range(1, 1000):
        until = time.clock_gettime(clock) + step
        while time.clock_gettime(clock) < until:
            time.sleep(0.001)
        if pulse.has_stopped():
            return steps
    raise AssertionError("it never stops")


def test_a_thread_that_computes_has_more_patience_than_one_that_waits() -> None:
    silence = Silence(0.2)
    with computing() as thread:
        busy, waiting = Pulse("busy", 0.2, thread), Pulse("waiting", 0.2)
        busy.beat(0.0)
        waiting.beat(0.0)
        steps = steps_until_stopped(busy, thread, silence.step)
        assert busy.is_busy
    patient = sum(not waiting.has_stopped() for _ in range(steps))
    assert BUSY_PATIENCE - 1 < steps / (patient + 1) <= BUSY_PATIENCE


def test_a_thread_that_waits_for_a_processor_is_busy() -> None:
    """The threads of one process share its interpreter, so other processes keep them from a processor."""
    command = [sys.executable, "-c", "print('computes', flush=True)\nwhile True: pass"]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert all(other.stdout is not None and other.stdout.readline() for other in others)
        with computing() as thread:
            clock, work = time.pthread_getcpuclockid(thread), ThreadWork(thread)
            work.since_last()
            before, began = time.clock_gettime(clock), time.monotonic()
            while time.clock_gettime(clock) - before < 0.2:
                time.sleep(0.01)
            assert work.since_last() > 0.8 * (time.monotonic() - began)
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_lock_of_the_log_does_not_keep_the_watchdog_from_ending_the_process() -> None:
    code = """
import asyncio, logging
from pagewire.wire import rpc
async def block():
    await asyncio.sleep(0.1)
    logging.lastResort.acquire()
    while True:
        pass
rpc.run(block(), 0.2)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, check=False).returncode == HUNG


def test_what_a_thread_computes_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with computing() as thread:
        told = threading.Semaphore(0)
        watchdog = Watchdog(20, end=lambda message: None, on_busy=told.release)
        pulse = watchdog.pulse("the event loop", thread)
        pulse.beat(0.0)
        watchdog.start()
        for _ in range(3):
            assert told.acquire(timeout=60), "a beat for the supervisor"
        watchdog.stop()
    (record,) = [one for one in caplog.records if "is busy" in one.getMessage()]
    assert "compute_here" in record.getMessage()
