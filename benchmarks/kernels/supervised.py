"""A tuning run that one configuration cannot end: it is tried in a process that is begun again without it.

The worker writes to a journal which configuration it is about to try and which shapes are done. If it crashes, loses
its device or does not go on for a while, the configuration it tried last is left out from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MAX_RESTARTS = 20
DEVICE_LOST = 75  # the worker's exit code: whatever it launches fails from now on


class Journal:
    """A line per event, in a file that both processes share; without a path, in none."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lines = path.read_text().splitlines() if path is not None and path.exists() else list[str]()
        self._known = set(self._lines)

    def trying(self, kernel: str, shape: Mapping[str, int], config: Mapping[str, int]) -> None:
        """Records that a configuration is about to run. config: none while buffers are made and the right result is
        timed."""
        self._write("trying", kernel, shape, config)

    def done(self, kernel: str, shape: Mapping[str, int]) -> None:
        self._write("done", kernel, shape)

    def leave_out(self, event: str) -> None:
        self._write("out", *json.loads(event)[1:])

    def is_left_out(self, kernel: str, shape: Mapping[str, int], config: Mapping[str, int]) -> bool:
        return _line("out", kernel, shape, config) in self._known

    def is_done(self, kernel: str, shape: Mapping[str, int]) -> bool:
        return _line("done", kernel, shape) in self._known

    def failed(self, what: str) -> None:
        self._write("failed", what)

    @property
    def has_failed(self) -> bool:
        return any(json.loads(line)[0] == "failed" for line in self._lines)

    def has_done(self, kernel: str) -> bool:
        """Returns whether any shape of it is done."""
        return any(json.loads(line)[:2] == ["done", kernel] for line in self._lines)

    @property
    def last_trial(self) -> str | None:
        """The event of what is being tried."""
        return self._lines[-1] if self._lines and json.loads(self._lines[-1])[0] == "trying" else None

    def _write(self, *event: object) -> None:
        line = _line(*event)
        self._lines.append(line)
        self._known.add(line)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line + "\n")


def _line(*event: object) -> str:
    return json.dumps([dict(part) if isinstance(part, Mapping) else part for part in event], sort_keys=True)


def supervise(command: Sequence[str], path: Path, seconds: float, patience: float) -> list[str]:
    """Runs the worker with its journal at `path` until it ends well; returns what was left out and why.

    seconds: of all, after which it is ended. patience: seconds without a line in the journal.
    """
    path.touch()
    end, left_out = time.monotonic() + seconds, list[str]()
    for _ in range(MAX_RESTARTS):
        process = subprocess.Popen(command, start_new_session=True)
        reason = _watch(process, path, end, patience)
        if reason is None:
            return left_out
        journal = Journal(path)
        if (trial := journal.last_trial) is None or time.monotonic() >= end:
            return [*left_out, f"tuning ended: {reason}"]
        journal.leave_out(trial)
        left_out.append(f"left out: {trial} ({reason})")
        print(left_out[-1], flush=True)
    return [*left_out, f"tuning ended: {MAX_RESTARTS} configurations in a row ended it"]


def _watch(process: subprocess.Popen[bytes], path: Path, end: float, patience: float) -> str | None:
    """Why the worker did not end well; None if it did (code 0, or 1: something was wrong, which it has said)."""
    size, since = -1, time.monotonic()
    while (code := _wait(process, 0.2)) is None:
        now = time.monotonic()
        if (grown := path.stat().st_size) != size:
            size, since = grown, now
        if now > end or now - since > patience:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # a driver may hold it; what comes next need not wait
            return "no time was left" if now > end else f"it took more than {patience:.0f} s"
    if code in (0, 1):
        return None
    return "the device was lost" if code == DEVICE_LOST else signal.Signals(-code).name if code < 0 else f"exit {code}"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
