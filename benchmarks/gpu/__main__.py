"""Runs what a first run on a GPU should show: `python -m benchmarks.gpu first --out DIR`, then `second`.

`first` has smoke tests (each kernel family against its reference, replays of graphs, a small model), side by side, then
the engine, attention and sampling; `second` products, experts and the tuning of decode attention. Each part is a
process of its own with a time limit, so a crash or a hang ends only that part. DIR/gpu.json and DIR/gpu.log are
rewritten after every part, and each part writes its own results as it goes to a folder of DIR; the last lines name
the parts that did not run. `--device cpu --small` rehearses a command without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from benchmarks.gpu import luggage, machine
from benchmarks.gpu.parts import SMOKE_SECONDS, Command, Part, commands
from benchmarks.gpu.processes import NOT_RUN, Outcome, run_part

_RESERVE = 10.0  # seconds at the end, for processes that are slow to end
_MOST_PROCESSES = 14  # side by side: most of their time is the host's, which compiles

# Runs a part for at most so many seconds, with its results in a directory; None: in one that is deleted.
Runs = Callable[[Part, float, Path | None], Outcome]


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=tuple(commands("cuda", False)))
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--seconds", type=float, help="the run ends by then (default: 470 and 220)")
    parser.add_argument("--only", help="parts, comma separated, by how their names begin, as: smoke,engine")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes; their times mean nothing")
    arguments = parser.parse_args()
    command = commands(arguments.device, arguments.small)[arguments.command]
    if arguments.only:
        command = _selected(command, tuple(arguments.only.split(",")))
        if not command.smoke and not command.measured:
            parser.error(f"--only {arguments.only}: no part begins so")
    out = arguments.out.resolve()
    with tempfile.TemporaryDirectory() as directory:
        environment, lines, fault = luggage.unpacked(Path(directory))
        command = replace(
            command, smoke=_with_stubs(command.smoke, fault), measured=_with_stubs(command.measured, fault)
        )
        record = Record(out, command, lines)
        seconds = (arguments.seconds or command.seconds) - (time.monotonic() - begun)
        run(command, record, seconds, partial(_process, environment))
    return record.finish()


def _selected(command: Command, names: tuple[str, ...]) -> Command:
    smoke, measured = (
        tuple(part for part in parts if part.name.startswith(names)) for parts in (command.smoke, command.measured)
    )
    return replace(command, smoke=smoke, measured=measured)


def _with_stubs(parts: Sequence[Part], fault: str) -> tuple[Part, ...]:
    """The parts, of which some cannot run if the services' stubs cannot be imported."""
    return tuple(replace(part, lacks=fault) if fault and part.needs_stubs else part for part in parts)


def _process(environment: Mapping[str, str], part: Part, seconds: float, directory: Path | None) -> Outcome:
    return run_part(replace(part, environment={**environment, **part.environment}), seconds, directory)


def run(
    command: Command,
    results: Results,
    seconds: float,
    run_one: Runs,
    clock: Callable[[], float] = time.monotonic,
    workers: int = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2)),
) -> None:
    """Runs the parts, and ends by then. workers: smoke tests side by side."""
    end = clock() + seconds - min(_RESERVE, seconds / 10)
    smoke_end = min(end, clock() + SMOKE_SECONDS)
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(_run_until, smoke_end, part, run_one, clock) for part in command.smoke]
        for future in as_completed(running):
            results.add(future.result())
    waiting = list(command.measured)
    while waiting:
        part = waiting.pop(0)
        # What earlier parts did not need is for those that follow.
        following = sum(other.seconds for other in waiting if not other.lacks)
        share = part.seconds / (part.seconds + following)
        outcome = run_one(part, (end - clock()) * share, results.directory(part))
        results.add(outcome)
        if (rest := _rest(part, outcome)) is not None:
            waiting.insert(0, rest)


def _run_until(end: float, part: Part, run_one: Runs, clock: Callable[[], float]) -> Outcome:
    return run_one(part, end - clock(), None)


def _rest(part: Part, outcome: Outcome) -> Part | None:
    """The groups that a part which crashed or hung had not begun, as a part; None: there are none."""
    begun = {group for result in outcome.results if isinstance(result, dict) for group in result.get("begun", ())}
    groups = {group: seconds for group, seconds in part.groups.items() if group not in begun}
    # One that ended before any group would end again.
    if outcome.state not in ("crashed", "hung") or not begun or not groups:
        return None
    return replace(part, name=f"{part.name} after a {outcome.state} one", groups=groups, seconds=sum(groups.values()))


class Results(Protocol):
    """Keeps the results of parts."""

    def directory(self, part: Part) -> Path:
        """Returns where a part writes its results as it goes."""

    def add(self, outcome: Outcome) -> None: ...


class Record:
    """The results, on disk after every part. Parts that have not run yet are there, too, should the run be ended."""

    def __init__(self, out: Path, command: Command, lines: Sequence[str] = ()) -> None:
        """lines: about what travelled here."""
        self._out = out
        planned = (*command.smoke, *command.measured)
        self._outcomes = {part.name: Outcome(part.name, NOT_RUN, detail="the run was ended before") for part in planned}
        self._clocks: dict[str, dict[str, str]] = {}
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._machine = machine.describe() | {"luggage": list(lines)}
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.log").write_text("")
        self._write()
        print(json.dumps(self._machine), flush=True)

    def directory(self, part: Part) -> Path:
        """Returns where a part writes its results as it goes."""
        path = self._out / part.name.replace(" ", "-")
        path.mkdir(exist_ok=True)
        return path

    def add(self, outcome: Outcome) -> None:
        self._outcomes[outcome.name] = outcome
        self._clocks[outcome.name] = machine.clocks()
        with (self._out / "gpu.log").open("a") as log:
            log.write(f"==== {outcome.name}: {outcome.state} {outcome.detail}\n{outcome.output}\n")
        self._write()
        print(_row(outcome), flush=True)

    def finish(self) -> int:
        """The table, by how bad it is; the exit code: 1 if any part was wrong, crashed or hung."""
        order = ("ok", "wrong", "crashed", "hung", NOT_RUN)
        outcomes = sorted(self._outcomes.values(), key=lambda outcome: order.index(outcome.state))
        print(f"\n{'part':34}{'state':10}{'s':>6}  detail")
        for outcome in outcomes:
            print(_row(outcome))
        print(f"JSON: {self._out / 'gpu.json'}, output of all parts: {self._out / 'gpu.log'}")
        for outcome in outcomes:
            if outcome.left_out:
                print(f"{outcome.name} had no time for {len(outcome.left_out)}: {'; '.join(outcome.left_out)}")
        missing = [outcome.name for outcome in outcomes if outcome.state == NOT_RUN]
        print(f"not run: {', '.join(missing) or 'nothing'}", flush=True)
        return int(any(outcome.state in ("wrong", "crashed", "hung") for outcome in outcomes))

    def _write(self) -> None:
        parts = [asdict(outcome) | {"clocks": self._clocks.get(name, {})} for name, outcome in self._outcomes.items()]
        data = {"time": self._started, "machine": self._machine, "parts": parts}
        path = self._out / "gpu.json"
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(data, indent=1) + "\n")
        beside.replace(path)


def _row(outcome: Outcome) -> str:
    return f"{outcome.name:34}{outcome.state:10}{outcome.seconds:>6.0f}  {outcome.detail}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
