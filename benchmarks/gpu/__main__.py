"""Runs everything that a first run on a GPU should show: `python -m benchmarks.gpu --out DIR --seconds 540`.

Machine and smoke tests come first (each kernel family against its reference, replays of graphs, a small model), side by
side; then the measurements, one after the other. Each part is a process of its own with a time limit, so a crash or a
hang ends only that part. DIR/gpu.json and DIR/gpu.log are rewritten after every part; a table at the end names the
parts that did not run. `--device cpu --small` tests the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu import machine
from benchmarks.gpu.parts import SMOKE_SECONDS, Part, measured_parts, smoke_parts
from benchmarks.gpu.processes import Outcome, run_part

_RESERVE = 10.0  # seconds at the end, for processes that are slow to end


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--seconds", type=float, default=540.0, help="the run ends by then (default: %(default)s)")
    parser.add_argument("--only", help="parts, comma separated, by how their names begin, as: smoke,decode")
    parser.add_argument(
        "--model", type=Path, help="directory of a real checkpoint, small (benchmarks.gpu.engine.real_checkpoint)"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes; their times mean nothing")
    arguments = parser.parse_args()
    smoke = smoke_parts(arguments.device, arguments.small)
    model = str(arguments.model.resolve()) if arguments.model else None  # parts run elsewhere
    measured = measured_parts(arguments.device, arguments.small, model)
    if arguments.only:
        names = tuple(arguments.only.split(","))
        smoke, measured = ([part for part in parts if part.name.startswith(names)] for parts in (smoke, measured))
    if not smoke and not measured:
        parser.error(f"--only {arguments.only}: no part begins so")
    return run(smoke, measured, arguments.out, arguments.seconds)


def run(smoke: Sequence[Part], measured: Sequence[Part], out: Path, seconds: float) -> int:
    """Returns 1 if any part was wrong, crashed or hung."""
    end = time.monotonic() + seconds - min(_RESERVE, seconds / 10)
    record = Record(out)
    smoke_end = min(end, time.monotonic() + SMOKE_SECONDS)
    # Most of their time is the host's, which compiles.
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
        running = [pool.submit(_run_until, smoke_end, part) for part in smoke]
        for future in as_completed(running):
            record.add(future.result())
    for index, part in enumerate(measured):
        left = [other.seconds for other in measured[index:] if not other.lacks]
        # What earlier parts did not need is for those that follow.
        share = part.seconds / sum(left) if left else 0.0
        record.add(run_part(part, (end - time.monotonic()) * share))
    return record.finish()


def _run_until(end: float, part: Part) -> Outcome:
    return run_part(part, end - time.monotonic())


class Record:
    """The results, on disk after every part."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._outcomes: list[Outcome] = []
        self._clocks: dict[str, dict[str, str]] = {}
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._machine = machine.describe()
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.log").write_text("")
        self._write()
        print(json.dumps(self._machine), flush=True)

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._clocks[outcome.name] = machine.clocks()
        with (self._out / "gpu.log").open("a") as log:
            log.write(f"==== {outcome.name}: {outcome.state} {outcome.detail}\n{outcome.output}\n")
        self._write()
        print(_row(outcome), flush=True)

    def finish(self) -> int:
        """The table, by how bad it is; the exit code."""
        order = ("ok", "wrong", "crashed", "hung", "not run")
        print(f"\n{'part':34}{'state':10}{'s':>6}  detail")
        for outcome in sorted(self._outcomes, key=lambda outcome: order.index(outcome.state)):
            print(_row(outcome))
        missing = [outcome.name for outcome in self._outcomes if outcome.state == "not run"]
        print(f"not run: {', '.join(missing) or 'nothing'}")
        print(f"JSON: {self._out / 'gpu.json'}, output of all parts: {self._out / 'gpu.log'}", flush=True)
        return int(any(outcome.state in ("wrong", "crashed", "hung") for outcome in self._outcomes))

    def _write(self) -> None:
        parts = [asdict(outcome) | {"clocks": self._clocks.get(outcome.name, {})} for outcome in self._outcomes]
        data = {"time": self._started, "machine": self._machine, "parts": parts}
        path = self._out / "gpu.json"
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(data, indent=1) + "\n")
        beside.replace(path)


def _row(outcome: Outcome) -> str:
    return f"{outcome.name:34}{outcome.state:10}{outcome.seconds:>6.0f}  {outcome.detail}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
