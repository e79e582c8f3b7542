"""Runs parts, each in a process of its own that may crash or hang, and says what became of each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part

ROOT = Path(__file__).parents[2]
NOT_RUN = "not run"
LEAST_SECONDS = 5.0  # with less a part is not begun
_TAIL = 6000  # characters of its output that the results keep
_COMPLAINT = re.compile(r"^(?:FAILED|WRONG:?)\s+(.*)", re.MULTILINE)
_LEFT_OUT = re.compile(r"^left out for lack of time[^:]*: (.*)", re.MULTILINE)


@dataclass
class Outcome:
    """A part's result. state: ok, wrong (results differ, or it raised), crashed, hung, not run. results: JSON files.
    left_out: cases for which it had no time."""

    name: str
    state: str
    seconds: float = 0.0
    detail: str = ""
    output: str = ""
    results: list[Any] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def run_part(part: Part, seconds: float, directory: Path | None = None, python: str = sys.executable) -> Outcome:
    """Ends within about `seconds`, whatever the part does. directory: keeps the results, which are there as soon as the
    part writes them; None: they are only in the outcome."""
    if part.lacks:
        return Outcome(part.name, NOT_RUN, detail=part.lacks)
    if seconds < LEAST_SECONDS:
        return Outcome(part.name, NOT_RUN, detail=f"no time was left ({max(0.0, seconds):.0f} s)")
    if directory is None:
        with tempfile.TemporaryDirectory() as temporary:
            return _run_in(part, seconds, Path(temporary), python)
    return _run_in(part, seconds, directory, python)


def _run_in(part: Part, seconds: float, directory: Path, python: str) -> Outcome:
    started = time.monotonic()
    values = {"out": str(directory), "budget": f"{part.ends_within * seconds:.0f}", "groups": ",".join(part.groups)}
    command = [*part.before, python, "-u", *(_filled(argument, values) for argument in part.arguments)]
    output = directory / "output.txt"
    code = _run(command, part.environment, output, seconds)
    text = output.read_text(errors="replace")
    output.unlink()  # the log has it
    results = [result for path in sorted(directory.rglob("*.json")) if (result := _json(path)) is not None]
    state, detail = _judged(code, text, seconds)
    took = time.monotonic() - started
    return Outcome(part.name, state, took, detail, text[-_TAIL:], results, _LEFT_OUT.findall(text))


def _filled(argument: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument


def _run(command: list[str], environment: dict[str, str], output: Path, seconds: float) -> int | None:
    """The exit code, negative for a signal; None if it had to be ended."""
    path = os.pathsep.join((*environment.get("PYTHONPATH", "").split(os.pathsep), str(ROOT))).strip(os.pathsep)
    variables = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment, "PYTHONPATH": path}
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=variables, start_new_session=True
            )
        except OSError as error:
            file.write(f"FAILED {error}\n".encode())
            return 127
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # The whole group: what it started does not hold the device any longer.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A driver may keep a process from ending: the next part goes on all the same.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


def _judged(code: int | None, text: str, seconds: float) -> tuple[str, str]:
    complaints = _COMPLAINT.findall(text)
    # Behind that is where Python was when it crashed, which the log has.
    lines = [line for line in text.partition("Fatal Python error")[0].splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    if code is None:
        return "hung", f"ended after {seconds:.0f} s; its last line: {last[:160]}"
    if code < 0:
        return "crashed", f"{signal.Signals(-code).name}; its last line: {last[:160]}"
    left_out = len(_LEFT_OUT.findall(text))
    if code == 0:
        return "ok", f"{left_out} cases left out for lack of time" if left_out else ""
    count = f"{len(complaints)} wrong, the first: {complaints[0][:200]}" if complaints else last[:200]
    return "wrong", count


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:  # it was ended while it wrote
        return None
