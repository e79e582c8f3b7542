"""Tuning tables and compiled forms of the Triton kernels.

python -m benchmarks.kernels tune [--kernel K] [--shapes small|all] [--out DIR] [--budget SECONDS]
python -m benchmarks.kernels tune --device cpu --out DIR    proves the tool, in Triton's interpreter
python -m benchmarks.kernels aot                            needs no GPU
python -m benchmarks.kernels wide                           needs no GPU
python -m benchmarks.kernels prefill                        needs no GPU
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tune = commands.add_parser("tune", help="measure configurations on this GPU and write the tuning tables")
    tune.add_argument("--kernel", action="append", help="a kernel with a table; may be repeated (default: all)")
    tune.add_argument("--shapes", choices=("tiny", "small", "all"), help="default: small, on a CPU tiny")
    tune.add_argument("--out", type=Path, help="where tables are written (default: kernels/tuning)")
    tune.add_argument("--device", default="cuda", help="cuda, or cpu for Triton's interpreter")
    tune.add_argument("--budget", type=float, default=3600, help="seconds; what does not fit is named")
    worker = commands.add_parser("tune-worker", help="what tune begins, and begins again where a configuration ends it")
    worker.add_argument("--kernel", action="append")
    worker.add_argument("--shapes")
    worker.add_argument("--out", type=Path)
    worker.add_argument("--device")
    worker.add_argument("--journal", type=Path)
    worker.add_argument("--until", type=float, default=0.0)
    worker.add_argument("--command", dest="asked")
    worker.add_argument("--compile-part", type=int, nargs=2)
    commands.add_parser("aot", help="compile every form for every architecture, and record what they use")
    commands.add_parser("wide", help="what products of 4-bit weights with many rows should take, by their machine code")
    commands.add_parser("prefill", help="how busy prefill attention should keep tensor cores, by its machine code")
    arguments = parser.parse_args()
    if arguments.command == "wide":
        from benchmarks.kernels import wide_report

        return wide_report.run()
    if arguments.command == "prefill":
        from benchmarks.kernels import prefill_counts

        return prefill_counts.run()
    if arguments.command == "aot":
        from benchmarks.kernels import aot

        return aot.run()
    if arguments.command == "tune-worker":
        return _work(arguments)
    if arguments.device == "cpu":
        if arguments.out is None:
            parser.error("--device cpu needs --out: times of the interpreter belong in no table of ours")
        os.environ["TRITON_INTERPRET"] = "1"  # before kernels are imported, here and by the worker
    from benchmarks.kernels import tune as tuner

    return tuner.run(arguments, shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]]))


def _work(arguments: argparse.Namespace) -> int:
    if arguments.compile_part:
        from benchmarks.kernels.forms import compile_forms

        return compile_forms.compile_part(arguments)
    from benchmarks.kernels import tune

    return tune.work(arguments)


if __name__ == "__main__":
    sys.exit(main())
