"""Checks and times cases, prints a row for each, and sums them up: targets missed, means over the cases of a peer."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.cases.case import OURS, Built, Case, Target, peer_of
from benchmarks.gpu.measure import Ceilings, check_capture, median_seconds
from benchmarks.gpu.report import Report, verdict


@dataclass(frozen=True)
class Measured:
    """A case's times; seconds by contestant. The case itself may hold buffers."""

    group: str
    name: str
    facts: dict[str, object]
    floor: float
    times: dict[str, float]
    verdicts: dict[str, str]

    @property
    def ours(self) -> float:
        return self.times[OURS]

    def ratio(self, peer: str, ours: str = OURS) -> float | None:
        """The peer's best time / ours; None if one is not there. ours: which of ours."""
        if ours not in self.times or not any(peer_of(name) == peer for name in self.times):
            return None
        return best(self.times, peer) / self.times[ours]


@dataclass(frozen=True)
class MeanTarget:
    """The target for the geometric mean of a peer's time / ours, over the cases that `selects` picks. ours: which of
    ours."""

    name: str
    peer: str
    must: float
    stretch: float | None
    selects: Callable[[Measured], bool]
    ours: str = OURS


class Table:
    """Checks, times and prints cases."""

    header = (
        f"{'case':48}{'µs':>9}{'floor':>9}{'copy':>6}{'read':>6}{'TFLOP/s':>8}"
        "  targets; others in µs (x = their time / ours)"
    )

    def __init__(self, report: Report, ceilings: Ceilings, judge: bool, means: Sequence[MeanTarget]) -> None:
        self._report = report
        self._judge = judge
        self._ceilings = ceilings
        self._means = means
        self.measured: list[Measured] = []
        self._notes: set[str] = set()
        self._misses: list[str] = []
        print(self.header, flush=True)

    def add(self, case: Case, device: torch.device) -> None:
        try:
            self._add(case, device)
        # Whatever a kernel's compiler or launcher raises: the other cases are still worth having.
        except Exception as error:
            self._report.failure(f"{case.group} {case.name}: {first_line(error)}")
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises, and ends the run, if the device is lost
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _add(self, case: Case, device: torch.device) -> None:
        built = case.build()
        ours = built.contestants[OURS]
        if ours.error is not None and not (error := ours.error()) <= ours.tolerance:
            self._report.failure(f"{case.group} {case.name}: error {error:.3g}, allowed {ours.tolerance:.3g}")
            return
        self._remove_wrong_peers(case, built, device)
        for note in built.notes:
            if note not in self._notes:
                self._notes.add(note)
                print(f"  missing  {note}", flush=True)
        times = median_seconds({name: c.calls for name, c in built.contestants.items()}, device, built.reset)
        self._record(case, times, built)

    def _remove_wrong_peers(self, case: Case, built: Built, device: torch.device) -> None:
        for name, peer in list(built.contestants.items()):
            if name == OURS:
                continue
            try:
                error = 0.0 if peer.error is None else peer.error()
                check_capture(peer.calls[0], device)
                reason = f"error {error:.3g}, allowed {peer.tolerance:.3g}" if not error <= peer.tolerance else ""
            # Other people's code, in shapes it may not know.
            except Exception as raised:
                reason = first_line(raised)
            if reason:
                built.notes.append(f"{name} on {case.name}: {reason}")
                del built.contestants[name]

    def _record(self, case: Case, times: dict[str, float], built: Built) -> None:
        ours, ceilings = times[OURS], self._ceilings
        floor = ceilings.floor_seconds(case.num_bytes, case.num_flops, case.rate)
        tflops = case.num_flops / ours / 1e12
        planning = {name: c.planning_seconds for name, c in built.contestants.items() if c.planning_seconds}
        measured = Measured(case.group, case.name, dict(case.facts), floor, times, {})
        for target in case.targets if self._judge else ():
            value = _value(target, measured, tflops)
            if value is not None:
                name = f"{target.unit} {target.against}".strip()
                measured.verdicts[name] = _verdict(target, value)
                if measured.verdicts[name] == "MISS":
                    self._misses.append(f"MISS {case.group} {case.name}: {name} {value:.3g}, must be {target.must:.3g}")
        self.measured.append(measured)
        self._report.row(
            self._line(case, measured, planning),
            group=case.group,
            name=case.name,
            **case.facts,
            num_bytes=case.num_bytes,
            num_flops=case.num_flops,
            floor_us=floor * 1e6,
            times_us={name: seconds * 1e6 for name, seconds in times.items()},
            planning_us={name: seconds * 1e6 for name, seconds in planning.items()},
            of_copy=case.num_bytes / ours / ceilings.copy,
            of_read=case.num_bytes / ours / ceilings.read,
            of_floor=floor / ours,
            tflops=tflops,
            verdicts=measured.verdicts,
            notes=built.notes,
        )

    def _line(self, case: Case, measured: Measured, planning: dict[str, float]) -> str:
        """The row below `header`."""
        ours, ceilings = measured.ours, self._ceilings
        return (
            f"{case.group + ' ' + case.name:48}{ours * 1e6:>9.2f}{measured.floor * 1e6:>9.2f}"
            f"{case.num_bytes / ours / ceilings.copy:>6.2f}{case.num_bytes / ours / ceilings.read:>6.2f}"
            f"{f'{case.num_flops / ours / 1e12:.0f}' if case.num_flops else '-':>8}  "
            + judged(measured)
            + "".join(
                f"; {name} {seconds * 1e6:.2f} ({seconds / ours:.2f}x)"
                + (f" plan {planning[name] * 1e6:.0f}" if name in planning else "")
                for name, seconds in measured.times.items()
                if name != OURS
            )
        )

    def summary(self) -> list[str]:
        """Misses, counts of verdicts, means of peers: those that something is asked of, and by group all others."""
        counts = Counter(text for measured in self.measured for text in measured.verdicts.values())
        lines = [
            *self._misses,
            "targets: " + (", ".join(f"{n} {text}" for text, n in sorted(counts.items())) or "none"),
        ]
        asked = set()
        for target in self._means:
            selected = [measured for measured in self.measured if target.selects(measured)]
            asked |= {(measured.group, target.peer) for measured in selected}
            lines += self._mean(target.name, target.peer, selected, target)
        peers = {(m.group, peer_of(name)) for m in self.measured for name in m.times if name != OURS}
        for group, peer in sorted(peers - asked):
            lines += self._mean(group, peer, [measured for measured in self.measured if measured.group == group])
        return lines

    def _mean(self, name: str, peer: str, measured: Sequence[Measured], target: MeanTarget | None = None) -> list[str]:
        ours = OURS if target is None else target.ours
        ratios = [ratio for case in measured if (ratio := case.ratio(peer, ours)) is not None]
        if not ratios:
            return [] if target is None else [f"{name}: no time of {peer}"]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text, which = "", "ours" if ours == OURS else f"ours {ours}"
        if self._judge and target is not None:
            text = f", {verdict(mean, target.must, target.stretch)} (must be {target.must:.3g})"
        return [
            f"{name}: {peer}'s time / {which}, geometric mean of {len(ratios)}: "
            f"{mean:.3f}{text}; worst {min(ratios):.3f}"
        ]


def judged(measured: Measured) -> str:
    return " ".join(f"{name}:{text}" for name, text in measured.verdicts.items())


def best(times: dict[str, float], peer: str) -> float:
    return min(seconds for name, seconds in times.items() if peer_of(name) == peer)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"


def _value(target: Target, measured: Measured, tflops: float) -> float | None:
    """The number that the target speaks of; None if the peer is not there."""
    if target.unit == "us":
        return measured.ours * 1e6
    if target.unit == "fraction":
        return measured.floor / measured.ours
    if target.unit == "tflops":
        return tflops
    return measured.ratio(target.against)


def _verdict(target: Target, value: float) -> str:
    if target.unit == "us":
        assert target.must is not None and target.stretch is not None
        return verdict(-value, -target.must, -target.stretch)
    return verdict(value, target.must, target.stretch)
