"""Every kernel's time beside its floor: `python -m benchmarks.gpu.kernels [--only decode,sampling]`.

First the device's ceilings (copy, read, bf16 matrix product), measured here. Then each kernel: checked against its
reference, then timed in turn with whoever else computes the same. benchmarks/README.md says how to read the table.
`--device cpu --small` proves the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import kernels  # noqa: F401  (registers the ops)
from benchmarks.gpu import attention_cases, elementwise_cases, sampling_cases
from benchmarks.gpu.cases import OURS, Built, Case, Target
from benchmarks.gpu.measure import Ceilings, check_capture, measure_ceilings, median_seconds
from benchmarks.gpu.peer_files import FlashInferBuild, PeerMissingError
from benchmarks.gpu.report import RESULTS, Budget, Report, verdict

Cases = Callable[[torch.device, bool, FlashInferBuild | None], Iterator[Case]]

# FlashInfer compiles while the first ones run.
GROUPS: dict[str, Cases] = {
    "elementwise": elementwise_cases.cases,
    "step": elementwise_cases.step_cases,
    "sampling": sampling_cases.cases,
    "decode": attention_cases.decode_cases,
    "prefill": attention_cases.prefill_cases,
    "variants": attention_cases.variant_cases,
}

# (group, peer) -> geometric mean of their time / ours: must, stretch
MEAN_TARGETS = {
    ("decode", "fa3"): (0.95, 1.05),
    ("decode", "flashinfer"): (1.0, 1.1),
    ("sampling", "flashinfer"): (0.9, 1.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, comma separated, of: {', '.join(GROUPS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, whose times mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds to stop after (default: %(default)s)")
    arguments = parser.parse_args()
    groups = arguments.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--only: no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return run(groups, torch.device(arguments.device), arguments.small, arguments.out, Budget(arguments.budget))


def run(groups: list[str], device: torch.device, small: bool, out: Path, budget: Budget) -> int:
    torch.manual_seed(0)
    report = Report("kernels", out, device, budget)
    build = _start_flashinfer_build(device, report)
    ceilings = measure_ceilings(device, small)
    report.note(
        "ceilings",
        ceilings.__dict__,
        f"ceilings: copy {ceilings.copy / 1e12:.3f} TB/s (read + written), read {ceilings.read / 1e12:.3f} TB/s, "
        f"bf16 matmul {ceilings.matmul / 1e12:.1f} TFLOP/s",
    )
    print(
        f"{'case':48}{'µs':>9}{'floor':>9}{'copy':>6}{'read':>6}{'TFLOP/s':>8}"
        "  targets; others in µs (x = their time / ours)",
        flush=True,
    )
    table = Table(report, ceilings, judge=not small)
    for group in GROUPS:
        if group not in groups:
            continue
        for case in GROUPS[group](device, small, build):
            if budget.allows(f"{case.group}: {case.name}"):
                table.add(case, device)
    return report.finish(table.summary())


def _start_flashinfer_build(device: torch.device, report: Report) -> FlashInferBuild | None:
    if device.type == "cpu":
        return None
    try:
        return FlashInferBuild()
    except PeerMissingError as reason:
        report.note("flashinfer", str(reason), f"no FlashInfer: {reason}")
        return None


class Table:
    """Checks, times and prints cases."""

    def __init__(self, report: Report, ceilings: Ceilings, judge: bool) -> None:
        self._report = report
        self._judge = judge
        self._ceilings = ceilings
        self._verdicts: Counter[str] = Counter()
        self._ratios: dict[tuple[str, str], list[float]] = defaultdict(list)  # (group, peer) -> their time / ours
        self._notes: set[str] = set()
        self._misses: list[str] = []

    def add(self, case: Case, device: torch.device) -> None:
        try:
            self._add(case, device)
        # Whatever a kernel's compiler or launcher raises: the other cases are still worth having.
        except Exception as error:
            self._report.failure(f"{case.group} {case.name}: {_first_line(error)}")
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises, and ends the run, if the device is lost
        gc.collect()
        if device.type == "cuda":
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
        planning = {name: c.planning_seconds for name, c in built.contestants.items() if c.planning_seconds}
        self._print(case, times, planning, built.notes)

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
                reason = _first_line(raised)
            if reason:
                built.notes.append(f"{name} on {case.name}: {reason}")
                del built.contestants[name]

    def _print(self, case: Case, times: dict[str, float], planning: dict[str, float], notes: list[str]) -> None:
        ours, ceilings = times[OURS], self._ceilings
        floor = ceilings.floor_seconds(case.num_bytes, case.num_flops)
        tflops = case.num_flops / ours / 1e12
        verdicts = {}
        for target in case.targets if self._judge else ():
            value = self._value(target, times, floor, tflops)
            if value is not None:
                name = f"{target.unit} {target.against}".strip()
                verdicts[name] = _verdict(target, value)
                self._verdicts[verdicts[name]] += 1
                if verdicts[name] == "MISS":
                    self._misses.append(f"MISS {case.group} {case.name}: {name} {value:.3g}, must be {target.must:.3g}")
        others = {name: seconds for name, seconds in times.items() if name != OURS}
        for name in {_peer(name) for name in others}:
            self._ratios[case.group, name].append(_best(times, name) / ours)
        line = (
            f"{case.group + ' ' + case.name:48}{ours * 1e6:>9.2f}{floor * 1e6:>9.2f}"
            f"{case.num_bytes / ours / ceilings.copy:>6.2f}{case.num_bytes / ours / ceilings.read:>6.2f}"
            f"{f'{tflops:.0f}' if case.num_flops else '-':>8}  "
            + " ".join(f"{name}:{text}" for name, text in verdicts.items())
            + "".join(
                f"; {name} {seconds * 1e6:.2f} ({seconds / ours:.2f}x)"
                + (f" plan {planning[name] * 1e6:.0f}" if name in planning else "")
                for name, seconds in others.items()
            )
        )
        self._report.row(
            line,
            group=case.group,
            name=case.name,
            num_bytes=case.num_bytes,
            num_flops=case.num_flops,
            floor_us=floor * 1e6,
            times_us={name: seconds * 1e6 for name, seconds in times.items()},
            planning_us={name: seconds * 1e6 for name, seconds in planning.items()},
            of_copy=case.num_bytes / ours / ceilings.copy,
            of_read=case.num_bytes / ours / ceilings.read,
            tflops=tflops,
            verdicts=verdicts,
            notes=notes,
        )

    def _value(self, target: Target, times: dict[str, float], floor: float, tflops: float) -> float | None:
        """The number that the target speaks of; None if the peer is not there."""
        if target.unit == "us":
            return times[OURS] * 1e6
        if target.unit == "fraction":
            return floor / times[OURS]
        if target.unit == "tflops":
            return tflops
        there = any(_peer(name) == target.against for name in times)
        return _best(times, target.against) / times[OURS] if there else None

    def summary(self) -> list[str]:
        lines = [
            *self._misses,
            "targets: " + (", ".join(f"{n} {text}" for text, n in sorted(self._verdicts.items())) or "none"),
        ]
        for (group, peer), ratios in sorted(self._ratios.items()):
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            judged = ""
            if self._judge and (group, peer) in MEAN_TARGETS:
                judged = f", {verdict(mean, *MEAN_TARGETS[group, peer])}"
            lines.append(
                f"{group}: {peer}'s time / ours, geometric mean of {len(ratios)}: {mean:.3f}{judged}"
                f"; worst {min(ratios):.3f}"
            )
        return lines


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"


def _peer(name: str) -> str:
    """Of FlashInfer's two decode kernels ("flashinfer cc" is the one for CUDA cores) the better one counts."""
    return name.removesuffix(" cc")


def _best(times: dict[str, float], peer: str) -> float:
    return min(seconds for name, seconds in times.items() if _peer(name) == peer)


def _verdict(target: Target, value: float) -> str:
    if target.unit == "us":
        assert target.must is not None and target.stretch is not None
        return verdict(-value, -target.must, -target.stretch)
    return verdict(value, target.must, target.stretch)


if __name__ == "__main__":
    sys.exit(main())
