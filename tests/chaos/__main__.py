"""Everything of `make chaos`, one part after the other; exits with 1 if one of them failed.

    python -m tests.chaos --schedules 300 --model-schedules 30 --fuzz-cases 2000 --soak-minutes 30
    python -m tests.chaos --only schedules

A part is a module with a command line of its own; see there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time


def parts(args: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """Returns the name of each part, its module in this package, and its command line."""
    seed = ["--seed", str(args.seed)]
    vectors = args.schedules // 10
    return [
        ("schedules", "faults.schedules", ["--line", "text", *seed, "--count", str(args.schedules - vectors)]),
        ("schedules", "faults.schedules", ["--line", "vectors", *seed, "--count", str(vectors)]),
        ("model-schedules", "faults.schedules", ["--line", "model", *seed, "--count", str(args.model_schedules)]),
        ("fuzz", "fuzz", ["--cases", str(args.fuzz_cases)]),
        ("soak", "soak", ["--minutes", str(args.soak_minutes)]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule")
    parser.add_argument("--schedules", type=int, default=300, help="of failures over a line with fake executors")
    parser.add_argument("--model-schedules", type=int, default=30, help="of failures over the built-in model")
    parser.add_argument("--fuzz-cases", type=int, default=2000, help="for each entry that is fuzzed")
    parser.add_argument("--soak-minutes", type=float, default=30)
    parser.add_argument("--only", choices=("schedules", "model-schedules", "fuzz", "soak"), help="this part alone")
    args = parser.parse_args()
    failed = []
    for name, module, arguments in parts(args):
        if args.only not in (None, name):
            continue
        print(f"== {module} {' '.join(arguments)}", flush=True)
        start = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"tests.chaos.{module}", *arguments]).returncode:
            failed.append(f"{module} {' '.join(arguments)}")
        print(f"== {time.monotonic() - start:.0f} s", flush=True)
    print(f"failed: {'; '.join(failed)}" if failed else "all passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
