"""The contest: all in turn within each row of each round, so that drift of the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.contestants import Contestant, ContestantError, Process
from benchmarks.peers.rows import Row, measured_by, seconds
from pagewire.tools.bench.prompts import RandomWords

# A row is marked if its rounds differ by more.
STEADY = 0.10


@dataclass
class Cell:
    """The figures of a contestant in a row, one per round.

    bound: what its output tok/s are below, if it was given up after too long a time. failure: why it has no figure.
    """

    values: list[float] = field(default_factory=list)
    bound: float | None = None
    failure: str = ""

    @property
    def median(self) -> float | None:
        return self.bound if self.bound is not None or not self.values else statistics.median(self.values)

    @property
    def is_steady(self) -> bool:
        return not self.values or max(self.values) - min(self.values) <= STEADY * statistics.median(self.values)


@dataclass
class Contest:
    """The cells by key of row and contestant, and why contestants were left out, by title."""

    contestants: list[Contestant]
    left_out: dict[str, str]
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    seconds: float = 0.0

    def cell(self, row: str, contestant: str) -> Cell:
        return self.cells.get((row, contestant), Cell())


class Runner:
    """Runs the rows on running contestants. limit: a load of whole requests, all at once, is given up when it takes
    this many times as long as the fastest contestant's, and is not tried again."""

    def __init__(
        self, contest: Contest, words: RandomWords, chat: Callable[[str], str], limit: float, logs: Path
    ) -> None:
        self._contest = contest
        self._words = words
        self._chat = chat
        self._limit = limit
        self._logs = logs
        self._running: list[Process] = []
        self._fastest: dict[str, float] = {}  # seconds by row

    def run(self, rows: Sequence[Row], rounds: int) -> None:
        began = time.monotonic()
        with ExitStack() as stack:
            self._start(stack)
            for number in range(rounds):
                for row in rows:
                    self._round(row, number)
        self._contest.seconds = time.monotonic() - began

    def _start(self, stack: ExitStack) -> None:
        """Loads one engine after the other, and lets each compute a little of every kind."""
        for contestant in self._contest.contestants:
            process = Process(contestant, self._logs / f"{contestant.key}.log")
            stack.callback(process.close)
            self._running.append(process)
        warm_up = [Row("", "", "", input_len=16, output_len=4, count=count, concurrency=count) for count in (1, 8, 64)]
        for process in list(self._running):
            try:
                process.await_ready()
                for row in warm_up:
                    process.run(row.work(row.prompts(self._words, self._chat)[1]))
            except ContestantError as error:
                self._lose(process, error)
            else:
                print(f"{process.contestant.title} is ready", flush=True)

    def _round(self, row: Row, number: int) -> None:
        """One row of one round; another contestant begins in each round."""
        loads = [row.prompts(self._words, self._chat) for _ in range(row.repeats)]
        able = [one for one in self._running if self._takes_part(row, one.contestant)]
        first = number % max(1, len(able))
        for process in [*able[first:], *able[:first]]:
            cell = self._contest.cells.setdefault((row.key, process.contestant.key), Cell())
            try:
                self._measure(process, row, loads, cell)
            except ContestantError as error:
                cell.failure = str(error).partition("\n")[0]
                self._lose(process, error)
            shown = cell.failure or (f"{cell.values[-1]:.1f}" if cell.bound is None else f"< {cell.bound:.0f}")
            print(f"round {number + 1}: {row.title}: {process.contestant.title}: {shown}", flush=True)

    def _takes_part(self, row: Row, contestant: Contestant) -> bool:
        able = row.key in measured_by(contestant.key) and (not row.needs or row.needs in contestant.can)
        return able and self._contest.cell(row.key, contestant.key).bound is None

    def _measure(
        self, process: Process, row: Row, loads: Sequence[tuple[Sequence[str], Sequence[str]]], cell: Cell
    ) -> None:
        fastest = self._fastest.get(row.key)
        limit_s = self._limit * fastest if fastest is not None and row.is_limited else None
        values = []
        for known, prompts in loads:
            if known:
                process.run(row.work(known))
            requests = process.run(row.work(prompts, limit_s))
            if requests is None:
                assert limit_s is not None
                cell.bound = row.count * row.output_len / limit_s
                return
            if not row.texts and {one.num_tokens for one in requests} != {row.output_len}:
                raise ContestantError(f"not all answers had {row.output_len} tokens")
            values.append(row.value(requests))
            self._fastest[row.key] = min(self._fastest.get(row.key, float("inf")), seconds(requests))
        cell.values.append(statistics.median(values))

    def _lose(self, process: Process, error: ContestantError) -> None:
        self._running.remove(process)
        process.close()
        self._contest.left_out[process.contestant.title] = str(error).partition("\n")[0]
        print(f"{process.contestant.title} is left out: {error}", flush=True)
