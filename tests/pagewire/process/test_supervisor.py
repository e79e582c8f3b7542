import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from pagewire.process.supervisor import Supervisor

REPOSITORY = Path(__file__).parents[3]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not happen within a minute"
        time.sleep(0.02)


class Stack:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[bytes]

    def start(self, options: Mapping[str, float] | None = None, **behaviours: str) -> "Stack":
        """Starts a stack; `options` go to the Supervisor."""
        items = [f"{name}={behaviour.replace('_', '-')}" for name, behaviour in behaviours.items()]
        with (self.directory / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.pagewire.process.stand_in",
                    "supervise",
                    str(self.directory),
                    json.dumps(options or {}),
                    *items,
                ],
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
            )
        return self

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    @property
    def events(self) -> list[list[str]]:
        path = self.directory / "events"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self, name: str | None = None) -> list[int]:
        return [int(event[2]) for event in self.events if event[0] == "start" and name in (None, event[1])]

    def stopped(self) -> list[str]:
        return [" ".join(event) for event in self.events if event[0] in ("stop", "cut")]

    def wait_ready(self) -> None:
        wait_until(lambda: "all ready" in self.output)

    def no_process_left(self) -> bool:
        return not any(psutil.pid_exists(pid) for pid in self.pids())


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.process.kill()
    stack.process.wait()
    wait_until(stack.no_process_left)


@pytest.mark.parametrize(("number", "how"), [(signal.SIGTERM, "stop"), (signal.SIGINT, "cut"), (signal.SIGHUP, "cut")])
def test_stops_in_order(stack: Stack, number: signal.Signals, how: str) -> None:
    stack.start(gateway="ok", tokenizer="ok", scheduler="ok", executor="ok").wait_ready()
    stack.process.send_signal(number)
    stack.process.send_signal(number)  # as `make` and the terminal both do
    assert stack.process.wait(60) == 0
    assert stack.stopped() == [f"{how} {name}" for name in ("gateway", "tokenizer", "scheduler", "executor")]
    assert stack.no_process_left()


def test_restarts_only_what_died_and_waits_longer_each_time(stack: Stack) -> None:
    stack.start(scheduler="ok", executor="ok").wait_ready()
    for _ in range(2):
        lived = stack.pids("executor")
        os.kill(lived[-1], signal.SIGKILL)
        wait_until(lambda lived=lived: len(stack.pids("executor")) > len(lived))  # type: ignore[misc]
    assert len(stack.pids("scheduler")) == 1
    assert "executor ended (killed by SIGKILL); restarting it in 0.2 s" in stack.output

    def reported() -> list[list[str]]:
        return [event[2:] for event in stack.events if event[:2] == ["after", "executor"]]

    wait_until(lambda: len(reported()) == 3)
    assert reported() == [["0", "False"], ["-9", "False"], ["-9", "False"]], "SIGKILL comes from outside"
    assert "restarting it in 0.4 s" in stack.output
    stack.process.terminate()
    assert stack.process.wait(60) == 0


async def test_what_cannot_be_said_of_services_that_are_ready_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def announce() -> None:
        raise BrokenPipeError("the banner has no reader")

    supervisor = Supervisor([], shutdown_timeout=1, takes_signals=False)
    running = asyncio.create_task(supervisor.run(announce))
    async with asyncio.timeout(10):
        while not caplog.records:  # noqa: ASYNC110 - what a task does
            await asyncio.sleep(0.01)
    supervisor.stop()
    assert await running == 0
    (record,) = caplog.records
    assert "all services are ready" in caplog.text and "the banner has no reader" in caplog.text
    assert record.levelname == "ERROR"


def test_deaths_far_apart_do_not_add_up(stack: Stack) -> None:
    stack.start({"stable_after": 0.0}, executor="ok").wait_ready()
    for number in range(1, 5):
        wait_until(
            lambda number=number: len(stack.pids()) == number == stack.output.count("executor is ready")  # type: ignore[misc]
        )
        os.kill(stack.pids("executor")[-1], signal.SIGKILL)
    wait_until(lambda: stack.output.count("restarting it in 0.2 s") == 4)


def test_what_hangs_is_killed_and_started_again(stack: Stack) -> None:
    """One that has never given a sign of life does not know that it should."""
    stack.start({"hang_timeout": 0.5}, scheduler="ok", executor="hangs").wait_ready()
    wait_until(lambda: len(stack.pids("executor")) == 2)
    assert "executor hangs: no sign of life for 1.5 s (--hang-timeout); killing it" in stack.output
    assert len(stack.pids("scheduler")) == 1


def test_what_hangs_shows_where_and_counts_as_failed(stack: Stack) -> None:
    """Whatever holds its interpreter, so that it cannot see to that itself."""
    stack.start({"hang_timeout": 0.5}, executor="sleeps").wait_ready()
    wait_until(lambda: len(stack.pids("executor")) == 2)
    assert "in sleep_here" in stack.output
    wait_until(lambda: ["after", "executor", str(-signal.SIGABRT), "True"] in stack.events)


def test_what_a_dead_service_started_goes_with_it(stack: Stack) -> None:
    stack.start(tokenizer="with_child").wait_ready()
    child = stack.pids("tokenizer-child")[0]
    os.kill(stack.pids("tokenizer")[0], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(child) and len(stack.pids("tokenizer-child")) == 2)


def test_starts_that_are_killed_are_repeated(stack: Stack) -> None:
    stack.start(executor="flaky").wait_ready()
    assert len(stack.pids("executor")) == 3


@pytest.mark.parametrize(
    ("behaviour", "starts", "reason"),
    [
        ("exit1", 1, "(exit code 1): see its error above"),
        ("exit70", 3, "(exit code 70): see its error above"),  # a hang, unlike a wrong flag, may be over
        ("exit2", 1, "(exit code 2): see its error above"),
        ("killed", 3, "(killed by SIGKILL): the system kills processes when memory runs out"),
    ],
)
def test_what_cannot_start_ends_the_stack(stack: Stack, behaviour: str, starts: int, reason: str) -> None:
    stack.start(gateway="ok", executor=behaviour)
    assert stack.process.wait(60) == 1
    assert f"the executor cannot start {reason}" in stack.output
    assert len(stack.pids("executor")) == starts
    assert stack.no_process_left()


def test_second_signal_kills(stack: Stack) -> None:
    stack.start(gateway="stubborn", executor="ok").wait_ready()
    stack.process.send_signal(signal.SIGINT)
    wait_until(lambda: ["ignored", "gateway"] in stack.events)
    while stack.process.poll() is None:
        stack.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    # The last one may come while the interpreter ends, which has no handler for it any more.
    assert stack.process.returncode in (130, -signal.SIGINT)
    assert stack.no_process_left()


def test_terminal_does_not_reach_the_services(stack: Stack) -> None:
    stack.start(gateway="ok", executor="ok").wait_ready()
    assert all(os.getsid(pid) == pid for pid in stack.pids())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signals it only on Linux; elsewhere a thread polls")
def test_no_orphan_when_the_supervisor_is_killed(stack: Stack) -> None:
    stack.start(gateway="ok", executor="stubborn").wait_ready()
    stack.process.kill()
    stack.process.wait()
    wait_until(stack.no_process_left)
