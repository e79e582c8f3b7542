"""Measures products with quantized weights beside others: `python -m benchmarks.gpu.quantized [--only w4a16,fp8]`.

Compiles every Triton kernel in parallel processes and measures the device's ceilings. Then each product is checked
against its reference and timed in turn with torch's dense product and with all others that multiply such weights.
benchmarks/README.md describes the tables. `--device cpu --small` tests the script without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.cases.case import OURS, Case, peer_of
from benchmarks.gpu.cases.product_cases import GROUPS, MEAN_TARGETS, cases, series
from benchmarks.gpu.compile_ahead import compile_ahead
from benchmarks.gpu.measure import Call, Ceilings, measure_ceilings, median_seconds
from benchmarks.gpu.report import RESULTS, Budget, Report
from benchmarks.gpu.table import Measured, Table, best, first_line, judged

COMPILE_SECONDS = 120.0
_CEILING_SIDE = 8192


class ProductTable(Table):
    """Columns of products, and at the end small tables by shape and batch size."""

    header = (
        f"{'product':40}{'µs':>9}{'floor':>9}{'share':>6}{'x torch':>8}  targets; others in µs (x = their time / ours)"
    )

    def _line(self, case: Case, measured: Measured, planning: dict[str, float]) -> str:
        faster = measured.ratio("torch")
        others = dict.fromkeys(peer_of(name) for name in measured.times if peer_of(name) not in (OURS, "torch"))
        return (
            f"{case.group + ' ' + case.name:40}{measured.ours * 1e6:>9.2f}{measured.floor * 1e6:>9.2f}"
            f"{measured.floor / measured.ours:>6.2f}{'-' if faster is None else f'{faster:.2f}':>8}  "
            + judged(measured)
            + "".join(
                f"; {name} {(seconds := best(measured.times, name)) * 1e6:.2f} ({seconds / measured.ours:.2f}x)"
                for name in others
            )
        )

    def summary(self) -> list[str]:
        """The tables come last: of a long output the end is what is seen."""
        lines = [*super().summary(), "torch's time / ours, and the share of the floor's speed; + stretch, ! MISS"]
        for name, rows in _by(self.measured, lambda m: f"{m.group} {m.facts['series']}").items():
            columns = sorted({_num_tokens(measured) for measured in rows})
            lines.append(f"{name:20}" + "".join(f"{f'M={column}':>11}" for column in columns))
            for shape, of_shape in _by(rows, lambda m: str(m.facts["shape"])).items():
                cells = {_num_tokens(measured): _cell(measured) for measured in of_shape}
                lines.append(f"  {shape:18}" + "".join(f"{cells.get(column, ''):>11}" for column in columns))
        return lines


def _by(rows: Iterable[Measured], key: Callable[[Measured], str]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for measured in rows:
        groups.setdefault(key(measured), []).append(measured)
    return groups


def _num_tokens(measured: Measured) -> int:
    count = measured.facts["num_tokens"]
    assert isinstance(count, int)
    return count


def _cell(measured: Measured) -> str:
    """Like "2.31+ .62!" """
    marks = {"stretch": "+", "MISS": "!"}
    faster, share = measured.ratio("torch"), measured.floor / measured.ours
    of_torch = "-" if faster is None else f"{faster:.2f}" + marks.get(measured.verdicts.get("ratio torch", ""), "")
    return f"{of_torch} {share:.2f}".replace(" 0.", " .") + marks.get(measured.verdicts.get("fraction", ""), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, comma separated, of: {', '.join(GROUPS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes; their times mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds to stop after (default: %(default)s)")
    arguments = parser.parse_args()
    groups = arguments.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--only: no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    gc.freeze()  # collecting after every case then looks through what the case has made, not through all of torch
    return run(groups, torch.device(arguments.device), arguments.small, arguments.out, Budget(arguments.budget))


def run(groups: Sequence[str], device: torch.device, small: bool, out: Path, budget: Budget) -> int:
    torch.manual_seed(0)
    report = Report("quantized", out, device, budget)
    if device.type == "cuda":
        report.note("compiling", *compile_ahead(groups, small, min(COMPILE_SECONDS, 0.4 * budget.left)))
    ceilings = _ceilings(device, small, report)
    report.note(
        "ceilings",
        ceilings.__dict__,
        f"ceilings: copy {ceilings.copy / 1e12:.3f} TB/s (read + written), read {ceilings.read / 1e12:.3f} TB/s; "
        f"matmul bf16 {ceilings.matmul / 1e12:.1f}, fp8 {ceilings.fp8 / 1e12:.1f}, int8 {ceilings.int8 / 1e12:.1f} "
        "T(FL)OP/s",
    )
    table = ProductTable(report, ceilings, not small, [mean for mean in MEAN_TARGETS if "w4a16" in groups])
    for one in series(groups, small):
        for shape in one.shapes:
            for case in cases(one, shape, device):
                if not budget.allows(f"{case.group}: {case.name} and larger batches"):
                    break
                table.add(case, device)
    return report.finish(table.summary())


def _ceilings(device: torch.device, small: bool, report: Report) -> Ceilings:
    """With those of fp8 and int8 where there is a GPU that has them."""
    ceilings = measure_ceilings(device, small)
    if device.type == "cpu":
        return ceilings
    shape = (2, _CEILING_SIDE, _CEILING_SIDE)
    a, b = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
    c, d = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    one = torch.ones((), device=device)
    products: dict[str, Call] = {
        "fp8": lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        "int8": lambda: torch._int_mm(c, d.t()),
    }
    for name, product in products.items():
        try:
            seconds = median_seconds({name: [product]}, device)[name]
        except RuntimeError as error:
            report.note(f"no_{name}", str(error), f"no ceiling of {name} products: {first_line(error)}")
            continue
        ceilings = replace(ceilings, **{name: 2 * _CEILING_SIDE**3 / seconds})
    return ceilings


if __name__ == "__main__":
    sys.exit(main())
