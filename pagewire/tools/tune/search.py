"""Tries flags one by one against the best so far, in turns, and keeps those that help."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire import flags
from pagewire.errors import StartupError
from pagewire.tools.tune.measure import Figures, median
from pagewire.tools.tune.tree import Candidate

# The least gain in each round; and that of a single round, which cannot be distinguished from chance otherwise.
LEAST_GAIN, LEAST_OF_ONE = 0.03, 0.2
# The largest loss of another goal for this one.
_MAY_LOSE = {"ttft": 0.8, "tpot": 0.8, "throughput": 0.0, "memory": 0.8}
_SLO = re.compile(r"(ttft|tpot)=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True)
class Slo:
    """The limits in milliseconds that 99 of 100 requests must meet."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> Slo:
        """Parses `--slo`. Raises StartupError."""
        bounds: dict[str, float] = {}
        for part in filter(None, (text or "").replace(" ", "").split(",")):
            match = _SLO.fullmatch(part)
            if match is None:
                raise StartupError(f"--slo {text}: expected as ttft=500ms,tpot=50ms")
            if f"{match[1]}_ms" in bounds:
                raise StartupError(f"--slo {text}: {match[1]} is given twice")
            bounds[f"{match[1]}_ms"] = float(match[2]) * (1000 if match[3] == "s" else 1)
        return cls(**bounds)

    def broken(self, figures: Figures) -> str:
        """Returns the objectives that are missed, in words; empty if all are met."""
        missed = []
        if self.ttft_ms is not None and figures.ttft_p99_ms > self.ttft_ms:
            missed.append(f"time to first token, p99, is {figures.ttft_p99_ms:.0f} ms and not {self.ttft_ms:g}")
        if self.tpot_ms is not None and figures.tpot_p99_ms > self.tpot_ms:
            missed.append(f"time per output token, p99, is {figures.tpot_p99_ms:.0f} ms and not {self.tpot_ms:g}")
        return ", ".join(missed)


def score(goal: str, figures: Figures) -> float:
    """Returns the score of a goal; more is better."""
    return {
        "ttft": 1e3 / max(1e-9, figures.ttft_ms),
        "tpot": 1e3 / max(1e-9, figures.tpot_ms),
        "throughput": figures.tokens_per_s,
        "memory": 1e3 / max(1e-9, figures.resident_mib),
    }[goal]


def is_gain(gains: Sequence[float]) -> bool:
    """Returns whether a difference is more than chance. gains: those of all rounds, rising. Their spread is chance: the
    least has to be more than half of it."""
    if len(gains) == 1:
        return gains[0] >= LEAST_OF_ONE
    return gains[0] >= max(LEAST_GAIN, (gains[-1] - gains[0]) / 2)


@dataclass
class Trial:
    """A candidate that was compared with the best before it. refused: why it could not be measured. loses: why it is
    not used despite its gain."""

    candidate: Candidate
    gains: tuple[float, ...] = (0.0,)  # those of all rounds, rising; 0.1: a tenth better
    is_taken: bool = False
    refused: str = ""
    loses: str = ""


@dataclass
class Found:
    """The result of a search. changes: those of the best. before, after: figures without changes and with the best,
    measured in turns at the end."""

    changes: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    before: Figures | None = None
    after: Figures | None = None
    gain: float = 0.0
    is_out_of_time: bool = False
    slo_broken: str = ""  # the objectives that the best misses


Measure = Callable[[Mapping[str, Any]], Figures]


@dataclass(frozen=True)
class Search:
    goal: str
    measure: Measure
    slo: Slo = field(default_factory=Slo)
    rounds: int = 3
    seconds: float = 600.0
    clock: Callable[[], float] = time.monotonic
    report: Callable[[str], None] = lambda text: None

    def run(self, candidates_of: Callable[[Figures], Sequence[Candidate]]) -> Found:
        """Searches for flags. candidates_of: returns candidates for the figures without changes. The result is compared
        once more with no changes, because with many attempts, chance alone may produce a gain."""
        found, started = Found(), self.clock()
        seen = self.measure({})
        if seen.failed:
            self.report(f"{seen.failed} requests fail with the flags as they are: {seen.error}")
        one = self.clock() - started
        for candidate in candidates_of(seen):
            # The comparison at the end takes as long as that of a candidate.
            if self.clock() - started + 4 * self.rounds * one > self.seconds:
                found.is_out_of_time = True
                break
            found.trials.append(self._try(candidate, found.changes))
            if found.trials[-1].is_taken:
                found.changes |= candidate.flags
        if found.changes:
            before, after = self._in_turns({}, found.changes)
            found.before, found.after = median(before), median(after)
            gains = self._gains(before, after)
            found.gain = gains[0]
            if not is_gain(gains) or self._loses(found.before, found.after):
                found.changes = {}
        else:
            found.before = seen
        best = found.after if found.changes and found.after is not None else found.before
        found.slo_broken = self.slo.broken(best)
        return found

    def _try(self, candidate: Candidate, changes: Mapping[str, Any]) -> Trial:
        trial = Trial(candidate)
        try:
            before, after = self._in_turns(changes, {**changes, **candidate.flags})
        except StartupError as error:
            trial.refused = str(error).splitlines()[0]
        else:
            trial.gains = self._gains(before, after)
            if is_gain(trial.gains):
                trial.loses = self._loses(median(before), median(after))
                trial.is_taken = not trial.loses
        self.report(line_of(trial))
        return trial

    def _in_turns(self, these: Mapping[str, Any], those: Mapping[str, Any]) -> tuple[list[Figures], list[Figures]]:
        pairs = [(self.measure(these), self.measure(those)) for _ in range(self.rounds)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _gains(self, before: Sequence[Figures], after: Sequence[Figures]) -> tuple[float, ...]:
        """Returns the gains of all rounds, rising. The smallest counts: a flag must help each time."""
        pairs = zip(before, after, strict=True)
        return tuple(sorted(score(self.goal, b) / score(self.goal, a) - 1 for a, b in pairs))

    def _loses(self, before: Figures, after: Figures) -> str:
        """Returns the unacceptable loss; "" if there is none."""
        if after.failed > before.failed:
            return "requests fail"
        if self.slo.broken(after) and not self.slo.broken(before):
            return f"it breaks --slo: {self.slo.broken(after)}"
        if after.tokens_per_s < _MAY_LOSE[self.goal] * before.tokens_per_s:
            return f"it costs {1 - after.tokens_per_s / before.tokens_per_s:.0%} of the tokens per second"
        return ""


def _percent(gain: float) -> str:
    return f"{round(gain, 2) + 0.0:+.0%}"  # avoids -0%


def line_of(trial: Trial) -> str:
    said = " ".join(f"{flags.flag_name(name)} {value}" for name, value in trial.candidate.flags.items())
    if trial.refused:
        return f"  {'':>14}  refused    {said}: {trial.refused}"
    verdict = "taken    " if trial.is_taken else "not taken"
    gains = " to ".join(map(_percent, (trial.gains[0], trial.gains[-1])[: len(trial.gains)]))
    return f"  {gains:>14}  {verdict}  {said} ({trial.candidate.why}{'; but ' if trial.loses else ''}{trial.loses})"
