"""Services that start in a fraction of the time: each is forked off a process that has imported everything already."""

import multiprocessing
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagewire import cli
from pagewire.process import process
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.step.step import StepOutput
from tests.e2e import fake_executor

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "pagewire.gateway.main",
        "pagewire.services.tokenizer.main",
        "pagewire.services.scheduler.main",
        "pagewire.services.executor.main",
        "tests.e2e.forked",
    ]
)
PAUSE = "pause"  # file beside the log of an executor


class Forked:
    """A service in a process of its own, with what a line needs of subprocess.Popen."""

    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Starts `pagewire` with these arguments, or a fake executor.

        Args:
            argv: the subcommand and its arguments.
            log: receives its output.
            environment: variables in addition to those of the tests.
        """
        # Not a daemon: it may have worker processes.
        self._process = _FORKS.Process(target=_run, args=(list(argv), log, {**os.environ, **environment}), daemon=False)
        self._process.start()
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


def _run(argv: list[str], log: Path, environment: dict[str, str]) -> None:
    process.die_with(os.getppid())
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if argv[0] == "fake-executor":
        fake_executor.main(argv[1:])
    else:
        if argv[0] == "executor":
            _take_pauses(log.with_name(PAUSE))
        cli.main(argv)


def _take_pauses(pause: Path) -> None:
    """Lets each step wait for the seconds that a file contains, while there is one."""
    execute = ModelRunner.execute

    def paused(runner: ModelRunner, *arguments: Any) -> StepOutput:
        with suppress(FileNotFoundError):
            time.sleep(float(pause.read_text()))
        return execute(runner, *arguments)

    ModelRunner.execute = paused  # type: ignore[method-assign]
