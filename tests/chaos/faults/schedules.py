"""Random failures over a line, and the answers of its clients, which have to be those of an undisturbed line.

    python -m tests.chaos.faults.schedules --line text --count 270
    python -m tests.chaos.faults.schedules --line text --seed 17 --count 1 --repeat 20
    python -m tests.chaos.faults.schedules --line model --count 3 --fault cut:0:scheduler  # this one, many requests

line: text = tokens of two fake executors, vectors = embeddings of two fake executors, model = the built-in model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from tests.chaos.faults.catalogue import RARE, TEXT, VECTORS
from tests.chaos.faults.chaos_line import ChaosLine, fake_line, real_line, running
from tests.chaos.faults.play import Outcome, Player
from tests.chaos.faults.schedule import Fault, draw, parse_fault

# fp32: recomputed tokens are those of an undisturbed run.
REAL_FLAGS = ["--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", "512MiB"]


@dataclass(frozen=True)
class Kind:
    """The kinds of lines."""

    requests: Sequence[str]
    max_asks: int
    timeout: float  # seconds for one schedule

    def line(self, directory: Path, model: Path) -> ChaosLine:
        if self is KINDS["model"]:
            return real_line(directory, model, REAL_FLAGS)
        return fake_line(directory, model, ["--embeds"] if self is KINDS["vectors"] else [])


KINDS = {
    "text": Kind([*TEXT, *RARE], 9, 60.0),
    "vectors": Kind(list(VECTORS), 6, 60.0),
    "model": Kind([*TEXT, *RARE], 6, 300.0),
}


async def play_all(kind: str, seeds: Sequence[int], model: Path, faults: Sequence[Fault] = ()) -> list[Outcome]:
    """Prints what happens. The directory of a line with failures is kept."""
    directory = Path(tempfile.mkdtemp(prefix="pw-chaos-"))
    outcomes: list[Outcome] = []
    requests, max_asks, timeout = KINDS[kind].requests, KINDS[kind].max_asks, KINDS[kind].timeout
    start = time.monotonic()
    async with running(KINDS[kind].line(directory, model)) as line:
        if unknown := {target for fault in faults for target in fault.targets} - {*line.services}:
            raise SystemExit(f"no {', '.join(unknown)} here: there are {', '.join(line.services)}")
        player = Player(line, directory.name, requests, max_asks, timeout)
        if problems := await player.learn():
            raise SystemExit("\n".join(problems))
        print(f"{kind}: the line is up after {time.monotonic() - start:.0f} s")
        if not line.has_disk:
            print(f"{kind}: the disk is never full, as this user may not mount one (`unshare --user --mount`)")
        for seed in seeds:
            outcomes.append(outcome := await player.play(draw(seed, player.setting, faults)))
            _report(kind, outcome, directory)
    if all(not outcome.problems for outcome in outcomes):
        shutil.rmtree(directory, ignore_errors=True)
    return outcomes


def _report(kind: str, outcome: Outcome, directory: Path) -> None:
    schedule = outcome.schedule
    state = "FAILED" if outcome.problems else "ok"
    times = f"{outcome.seconds:5.1f} s, silent for {outcome.longest_silence:4.1f} s"
    print(f"{kind} {schedule.seed:5} {times} {state:6} {schedule}", flush=True)
    if outcome.problems:
        print("  asked:", ", ".join(f"{ask.name}{' kept' if ask.is_kept else ''}" for ask in schedule.asks))
        for problem in outcome.problems:
            print("  ", problem)
        again = f"python -m tests.chaos.faults.schedules --line {kind} --seed {schedule.seed} --count 1 --repeat 10"
        print(f"  logs: {directory}; again: {again}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line", choices=list(KINDS), default="text")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--count", type=int, default=300, help="schedules")
    parser.add_argument("--repeat", type=int, default=1, help="times that each is played: they also depend on timing")
    parser.add_argument("--fault", type=parse_fault, action="append", default=[], help=parse_fault.__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args(arguments)
    seeds = [seed for seed in range(args.seed, args.seed + args.count) for _ in range(args.repeat)]
    start = time.monotonic()
    outcomes = uvloop.run(play_all(args.line, seeds, resolve_model(args.model), args.fault))
    failed = sorted({outcome.schedule.seed for outcome in outcomes if outcome.problems})
    silences = sorted(outcome.longest_silence for outcome in outcomes) or [0.0]
    comebacks = sum(outcome.num_comebacks for outcome in outcomes)
    print(
        f"{args.line}: {len(outcomes)} schedules in {time.monotonic() - start:.0f} s, {len(failed)} failed"
        f" {failed or ''}; streams were silent for {silences[len(silences) // 2]:.1f} s in half of them, at most"
        f" {silences[-1]:.1f} s; clients of gateways came again {comebacks} times"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
