"""Tries flags one by one against the best so far, in turns, and keeps what helps."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire import flags
from pagewire.errors import StartupError
from pagewire.tune.measure import Figures, median
from pagewire.tune.tree import Candidate

# A gain below this is not told from chance by a few rounds.
LEAST_GAIN = 0.03
# What another goal may lose for this one.
_MAY_LOSE = {"ttft": 0.8, "tpot": 0.8, "throughput": 0.0, "memory": 0.8}
_SLO = re.compile(r"(ttft|tpot)=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True)
class Slo:
    """Milliseconds that 99 of 100 requests keep."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> Slo:
        """Of `--slo`. Raises StartupError."""
        bounds: dict[str, float] = {}
        for part in filter(None, (text or "").replace(" ", "").split(",")):
            match = _SLO.fullmatch(part)
            if match is None:
                raise StartupError(f"--slo {text}: expected as ttft=500ms,tpot=50ms")
            bounds[f"{match[1]}_ms"] = float(match[2]) * (1000 if match[3] == "s" else 1)
        return cls(**bounds)

    def is_kept(self, figures: Figures) -> bool:
        return (self.ttft_ms is None or figures.ttft_p99_ms <= self.ttft_ms) and (
            self.tpot_ms is None or figures.tpot_p99_ms <= self.tpot_ms
        )


def score(goal: str, figures: Figures) -> float:
    """More is better."""
    return {
        "ttft": 1e3 / max(1e-9, figures.ttft_ms),
        "tpot": 1e3 / max(1e-9, figures.tpot_ms),
        "throughput": figures.tokens_per_s,
        "memory": 1e3 / max(1e-9, figures.resident_mib),
    }[goal]


@dataclass
class Trial:
    """A candidate that was measured beside the best before it. refused: why it could not be. loses: what keeps it from
    being taken, though it gains."""

    candidate: Candidate
    gain: float = 0.0  # 0.1: a tenth better
    is_taken: bool = False
    refused: str = ""
    loses: str = ""


@dataclass
class Found:
    """changes: of the best. before, after: of defaults and best, measured in turns at the end."""

    changes: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    before: Figures | None = None
    after: Figures | None = None
    gain: float = 0.0
    is_out_of_time: bool = False


Measure = Callable[[Mapping[str, Any]], Figures]


@dataclass(frozen=True)
class Search:
    goal: str
    measure: Measure
    slo: Slo = field(default_factory=Slo)
    rounds: int = 2
    seconds: float = 600.0
    clock: Callable[[], float] = time.monotonic
    tell: Callable[[str], None] = lambda text: None

    def run(self, candidates_of: Callable[[Figures], Sequence[Candidate]]) -> Found:
        """candidates_of: what may help, given what is seen without changes. The flags found are measured against none
        once more, so that chance, which had many tries, does not choose alone."""
        found, started = Found(), self.clock()
        seen = self.measure({})
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
            found.gain = self._gain(before, after)
            if found.gain < LEAST_GAIN or self._loses(found.before, found.after):
                found.changes = {}
        else:
            found.before = seen
        return found

    def _try(self, candidate: Candidate, changes: Mapping[str, Any]) -> Trial:
        trial = Trial(candidate)
        try:
            before, after = self._in_turns(changes, {**changes, **candidate.flags})
        except StartupError as error:
            trial.refused = str(error).splitlines()[0]
        else:
            trial.gain = self._gain(before, after)
            if trial.gain >= LEAST_GAIN:
                trial.loses = self._loses(median(before), median(after))
                trial.is_taken = not trial.loses
        self.tell(told(trial))
        return trial

    def _in_turns(self, these: Mapping[str, Any], those: Mapping[str, Any]) -> tuple[list[Figures], list[Figures]]:
        pairs = [(self.measure(these), self.measure(those)) for _ in range(self.rounds)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _gain(self, before: Sequence[Figures], after: Sequence[Figures]) -> float:
        """The smallest of all rounds: what helps does so each time."""
        ratios = [score(self.goal, b) / score(self.goal, a) for a, b in zip(before, after, strict=True)]
        return min(ratios) - 1

    def _loses(self, before: Figures, after: Figures) -> str:
        """What must not be lost for the goal, and is."""
        if after.failed > before.failed:
            return "requests fail"
        if self.slo.is_kept(before) and not self.slo.is_kept(after):
            return "it breaks --slo"
        if after.tokens_per_s < _MAY_LOSE[self.goal] * before.tokens_per_s:
            return f"it costs {1 - after.tokens_per_s / before.tokens_per_s:.0%} of the tokens per second"
        return ""


def told(trial: Trial) -> str:
    said = " ".join(f"{flags.flag_name(name)} {value}" for name, value in trial.candidate.flags.items())
    if trial.refused:
        return f"  refused   {said}: {trial.refused}"
    verdict = "taken    " if trial.is_taken else "not taken"
    return (
        f"  {trial.gain:+6.0%}  {verdict}  {said} ({trial.candidate.why}{'; but ' if trial.loses else ''}{trial.loses})"
    )
