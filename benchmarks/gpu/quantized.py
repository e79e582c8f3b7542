"""Products with quantized weights beside other people's: `python -m benchmarks.gpu.quantized [--only w4a16,fp8]`.

First, in processes beside each other, every kernel in Triton is compiled. Then the device's ceilings, measured here,
then every product: checked against `kernels.reference_quantized`, and timed in turn with torch's dense product and with
whoever else multiplies such weights. benchmarks/README.md says how to read the tables. `--device cpu --small` proves
the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import kernels  # noqa: F401  (registers the ops)
from benchmarks.gpu.cases import OURS, Case, peer_of
from benchmarks.gpu.compile_ahead import compile_ahead
from benchmarks.gpu.measure import Ceilings, measure_ceilings, median_seconds
from benchmarks.gpu.product_cases import GROUPS, MEAN_TARGETS, cases, series
from benchmarks.gpu.report import RESULTS, Budget, Report
from benchmarks.gpu.table import Measured, Table, best, judged

COMPILE_SECONDS = 120.0
_CEILING_SIDE = 8192


class ProductTable(Table):
    """Columns of products; at the end tables of speed-ups and of shares of the floor."""

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
        lines = []
        for name, rows in _by(self.measured, lambda m: f"{m.group} {m.facts['series']}").items():
            columns = sorted({_num_tokens(measured) for measured in rows})
            for title, cell in (("torch's time / ours", _speed_up), ("share of the floor's speed", _share)):
                lines.append(f"{name + ', ' + title:44}" + "".join(f"{column:>9}" for column in columns))
                for shape, of_shape in _by(rows, lambda m: str(m.facts["shape"])).items():
                    cells = {_num_tokens(measured): cell(measured) for measured in of_shape}
                    lines.append(f"  {shape:42}" + "".join(f"{cells.get(column, ''):>9}" for column in columns))
        return [*lines, "+ stretch, ! MISS, by the target of that number", *super().summary()]


def _by(rows: Iterable[Measured], key: Callable[[Measured], str]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for measured in rows:
        groups.setdefault(key(measured), []).append(measured)
    return groups


def _num_tokens(measured: Measured) -> int:
    count = measured.facts["num_tokens"]
    assert isinstance(count, int)
    return count


_MARKS = {"stretch": "+", "MISS": "!"}


def _speed_up(measured: Measured) -> str:
    ratio = measured.ratio("torch")
    return "" if ratio is None else f"{ratio:.2f}" + _MARKS.get(measured.verdicts.get("ratio torch", ""), " ")


def _share(measured: Measured) -> str:
    share = measured.floor / measured.ours
    return f"{share:.2f}" + _MARKS.get(measured.verdicts.get("fraction", ""), " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, comma separated, of: {', '.join(GROUPS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, whose times mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds to stop after (default: %(default)s)")
    arguments = parser.parse_args()
    groups = arguments.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--only: no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return run(groups, torch.device(arguments.device), arguments.small, arguments.out, Budget(arguments.budget))


def run(groups: Sequence[str], device: torch.device, small: bool, out: Path, budget: Budget) -> int:
    torch.manual_seed(0)
    report = Report("quantized", out, device, budget)
    if device.type == "cuda":
        report.note("compiling", *compile_ahead(groups, small, COMPILE_SECONDS))
    ceilings = _ceilings(device, small)
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
                if budget.allows(f"{case.group}: {case.name}"):
                    table.add(case, device)
    return report.finish(table.summary())


def _ceilings(device: torch.device, small: bool) -> Ceilings:
    """With those of fp8 and int8 where there is a GPU that has them."""
    ceilings = measure_ceilings(device, small)
    if device.type == "cpu":
        return ceilings
    side = _CEILING_SIDE
    a, b = torch.randn(2, side, side, device=device).to(torch.float8_e4m3fn)
    c, d = torch.randint(-127, 128, (2, side, side), dtype=torch.int8, device=device)
    one = torch.ones((), device=device)
    times = median_seconds(
        {
            "fp8": [lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)],
            "int8": [lambda: torch._int_mm(c, d.t())],
        },
        device,
    )
    return replace(ceilings, **{name: 2 * side**3 / seconds for name, seconds in times.items()})


if __name__ == "__main__":
    sys.exit(main())
