"""The follower processes of an executor with several ranks, on the leader's machine.

They start before the leader's slow imports, so that all ranks import at the same time.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pagewire import flags
from pagewire.config import ExecutorConfig
from pagewire.process.process import PARENT_PID, PREDECESSOR
from pagewire.process.watchdog import HEARTBEAT_FD
from pagewire.stack import launch
from pagewire.telemetry import logs

_END_S = 3.0  # in which followers may end without a signal
# Variables of the supervisor that are meant for the leader alone.
_OF_THE_LEADER = (HEARTBEAT_FD, PREDECESSOR)


class LocalFollowers:
    """The followers of one executor. Make it on the main thread: they die with it."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="pagewire-ranks-"))
        self.address = f"unix:{self._directory}/leader.sock"  # of the leader
        self.secret = secrets.token_hex(32)
        config = replace(config, leader=self.address, group_secret=self.secret, metrics_port=None)
        config = replace(config, listen=ExecutorConfig.listen)  # that of the leader is not for them
        self.processes = {rank: _start(replace(config, rank=rank)) for rank in range(1, config.num_ranks)}

    def stop(self) -> None:
        """Waits until the followers end, and kills those that do not."""
        for process in self.processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


_started: list[LocalFollowers] = []


def start(config: ExecutorConfig) -> None:
    """Starts the followers of the executor that this process is about to become, if it has any."""
    if config.starts_followers:
        _started.append(LocalFollowers(config))


def started(config: ExecutorConfig) -> LocalFollowers:
    """Returns the followers that start() started, or new ones."""
    return _started.pop() if _started else LocalFollowers(config)


def _start(config: ExecutorConfig) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in launch.environment(config).items() if name not in _OF_THE_LEADER}
    leader, of, model = os.environ.get(logs.NAME, "executor").partition(logs.OF)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pagewire.cli", "executor", *flags.to_argv(config)],
        env={
            **environment,
            PARENT_PID: str(os.getpid()),
            logs.NAME: f"{leader}-rank{config.rank}{of}{model}",
        },
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def ending(code: int) -> str:
    """Returns in words how a process ended."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
