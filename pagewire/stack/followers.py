"""The other processes of an executor with several ranks, started on the leader's machine.

They are started before the leader imports what takes seconds, so that all ranks do that at the same time.
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

_END_S = 3.0  # to end by themselves
# What a supervisor says to the leader alone.
_OF_THE_LEADER = (HEARTBEAT_FD, PREDECESSOR)


class LocalFollowers:
    """Made on the main thread: they die with it."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="pagewire-ranks-"))
        self.address = f"unix:{self._directory}/leader.sock"  # where they look for the leader
        self.secret = secrets.token_hex(32)
        config = replace(config, leader=self.address, group_secret=self.secret, listen="", metrics_port=None)
        self.processes = {rank: _start(replace(config, rank=rank)) for rank in range(1, config.num_ranks)}

    def stop(self) -> None:
        """Waits for those that have been told to end, and ends the others."""
        for process in self.processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


_started: list[LocalFollowers] = []


def start(config: ExecutorConfig) -> None:
    """Those of an executor that this process is about to become, if it has any."""
    if config.starts_followers:
        _started.append(LocalFollowers(config))


def started(config: ExecutorConfig) -> LocalFollowers:
    """Those that were started, or else new ones."""
    return _started.pop() if _started else LocalFollowers(config)


def _start(config: ExecutorConfig) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in launch.environment(config).items() if name not in _OF_THE_LEADER}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pagewire.cli", "executor", *flags.to_argv(config)],
        env={**environment, PARENT_PID: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
