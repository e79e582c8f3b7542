"""The watchdog ends a process that hangs, and no other."""

import subprocess
import sys
import threading
from pathlib import Path

from pagewire.process.watchdog import Silence, Watchdog

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
    assert ended.returncode == 1 and "done" not in ended.stdout
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
