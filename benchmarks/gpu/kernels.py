"""Measures every kernel against its floor: `python -m benchmarks.gpu.kernels [--only decode,sampling]`.

Measures the device's ceilings (copy, read, bf16 matrix product), then each kernel: it is checked against its reference
and timed in turn with all others that compute the same. Groups run in the order in which they are named, each in its
share of the time. benchmarks/README.md describes the table. `--device cpu --small` tests the script without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch

from benchmarks.gpu.cases import (
    attention_cases,
    elementwise_cases,
    expert_cases,
    layer_cases,
    product_cases,
    sampling_cases,
)
from benchmarks.gpu.cases.case import IN_TURN, OURS, Case
from benchmarks.gpu.measure import measure_ceilings
from benchmarks.gpu.parts import GROUP_SECONDS
from benchmarks.gpu.report import RESULTS, Budget, Report
from benchmarks.gpu.table import MeanTarget, Measured, Table, first_line

Cases = Callable[[torch.device, bool], Iterator[Case]]

GROUPS: dict[str, Cases] = {
    "elementwise": elementwise_cases.cases,
    "step": elementwise_cases.step_cases,
    "products": layer_cases.cases,
    "sampling": sampling_cases.cases,
    "decode": attention_cases.decode_cases,
    "prefill": attention_cases.prefill_cases,
    "variants": attention_cases.variant_cases,
    "experts": expert_cases.cases,
    "w4": product_cases.w4_cases,
}
# The share of a group's cases in the time of a run, where it runs beside others.
_SECONDS = {group: seconds for groups in GROUP_SECONDS.values() for group, seconds in groups.items()}
_OTHER_SECONDS = 30.0


def _in_group(group: str) -> Callable[[Measured], bool]:
    return lambda measured: measured.group == group


MEAN_TARGETS = (
    MeanTarget("decode", "fa3", 0.95, 1.05, _in_group("decode")),
    # Beside early launches, which back-to-back calls of ours have and those of others have not.
    MeanTarget("decode", "fa3", 0.85, 1.0, _in_group("decode"), IN_TURN),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, comma separated, of: {', '.join(GROUPS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--check", action="store_true", help="only compare with the references: nothing is timed")
    parser.add_argument("--part", type=_part, default=(1, 1), help="as 2/4: every fourth case, from the second on")
    parser.add_argument("--small", action="store_true", help="tiny shapes; their times mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds to stop after (default: %(default)s)")
    arguments = parser.parse_args()
    groups = arguments.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--only: no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    gc.freeze()  # collecting after every case then looks through what the case has made, not through all of torch
    device, budget = torch.device(arguments.device), Budget(arguments.budget)
    if arguments.check:
        return check(groups, device, arguments.small, arguments.out, budget, *arguments.part)
    return run(groups, device, arguments.small, arguments.out, budget)


def _part(text: str) -> tuple[int, int]:
    part, _, count = text.partition("/")
    if not (part.isdecimal() and count.isdecimal() and 0 < int(part) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text} is none; the second of four is 2/4")
    return int(part), int(count)


def check(
    groups: list[str], device: torch.device, small: bool, out: Path, budget: Budget, part: int, count: int
) -> int:
    """Ours against the references. Several processes may do it side by side: most of it is compiling."""
    torch.manual_seed(0)
    report = Report(f"check-{part}", out, device, budget)
    for group in groups:
        for case in islice(GROUPS[group](device, small), part - 1, None, count):
            if budget.allows(f"{case.group}: {case.name}"):
                _check(case, report)
    return report.finish([])


def _check(case: Case, report: Report) -> None:
    try:
        ours = case.build().contestants[OURS]
        error = 0.0 if ours.error is None else ours.error()
    # Whatever a kernel's compiler or launcher raises: the other cases are still worth having.
    except Exception as reason:
        report.failure(f"{case.group} {case.name}: {first_line(reason)}")
        return
    report.row(f"{case.name}: error {error:.3g}", group=case.group, name=case.name, error=error)
    if not error <= ours.tolerance:
        report.failure(f"{case.group} {case.name}: error {error:.3g}, allowed {ours.tolerance:.3g}")


def run(groups: list[str], device: torch.device, small: bool, out: Path, budget: Budget) -> int:
    torch.manual_seed(0)
    report = Report("kernels", out, device, budget)
    ceilings = measure_ceilings(device, small)
    report.note(
        "ceilings",
        ceilings.__dict__,
        f"ceilings: copy {ceilings.copy / 1e12:.3f} TB/s (read + written), read {ceilings.read / 1e12:.3f} TB/s, "
        f"bf16 matmul {ceilings.matmul / 1e12:.1f} TFLOP/s",
    )
    means = [target for target in MEAN_TARGETS if target.name in groups]
    means += product_cases.W4_MEAN_TARGETS if "w4" in groups else []
    table = Table(report, ceilings, not small, means)
    for index, group in enumerate(groups):
        report.note("begun", groups[: index + 1], f"{group}:")
        # No group takes the time of those that follow, and what it does not need is theirs.
        shares = [_SECONDS.get(other, _OTHER_SECONDS) for other in groups[index:]]
        share = budget.part(budget.left * shares[0] / sum(shares))
        for case in GROUPS[group](device, small):
            if share.allows(f"{case.group}: {case.name}"):
                table.add(case, device)
    return report.finish(table.summary())


if __name__ == "__main__":
    sys.exit(main())
