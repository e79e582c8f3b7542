"""Rows on standard output as they come, the same as JSON in a file after every row, and what was left out."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"


class Budget:
    """Wall-clock seconds that a run may take. What is left out is named at the end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self.left_out: list[str] = []

    def part(self, seconds: float) -> Budget:
        """Returns a budget of so many seconds, at most all that are left. What it leaves out this one names, too."""
        part = Budget(min(seconds, self.left), self._clock)
        part.left_out = self.left_out
        return part

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._end - self._clock())

    def allows(self, name: str, seconds: float = 0.0) -> bool:
        """Returns whether `name`, which takes about so many seconds, still fits."""
        fits = self._clock() + seconds < self._end
        if not fits:
            self.left_out.append(name)
        return fits


class Report:
    """One run's results."""

    def __init__(self, name: str, out: Path, device: torch.device, budget: Budget) -> None:
        self._budget = budget
        machine = device_name(device)
        slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
        self._path = out / f"{time.strftime('%Y-%m-%d', time.gmtime())}-gpu-{name}-{slug}.json"
        self._data: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": machine,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "rows": [],
        }
        self.failures: list[str] = []
        print(f"{machine}, torch {torch.__version__}, {self._data['time']}", flush=True)

    def note(self, name: str, value: Any, line: str) -> None:
        """Something about the whole run."""
        self._data[name] = value
        print(line, flush=True)
        self._write()

    def row(self, line: str, **values: Any) -> None:
        self._data["rows"].append(values)
        print(line, flush=True)
        self._write()

    def failure(self, what: str) -> None:
        """Something is wrong, not slow: the run ends with exit code 1."""
        self.failures.append(what)
        print(f"  WRONG  {what}", flush=True)
        self._write()

    def finish(self, lines: list[str]) -> int:
        """Prints the closing lines; the exit code."""
        self._data["summary"] = lines
        self._write()
        for line in lines:
            print(line)
        for what in self._budget.left_out:
            print(f"left out for lack of time (--budget): {what}")
        for what in self.failures:
            print(f"WRONG: {what}")
        print(f"JSON: {self._path}", flush=True)
        return 1 if self.failures else 0

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        data = self._data | {"left_out": self._budget.left_out, "failures": self.failures}
        self._path.write_text(json.dumps(data, indent=1) + "\n")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def verdict(value: float, must: float | None, stretch: float | None) -> str:
    """Returns stretch, pass or MISS; more is better."""
    if must is None and stretch is None:
        return "-"
    if stretch is not None and value >= stretch:
        return "stretch"
    if must is None:
        return "below stretch"
    return "pass" if value >= must else "MISS"
