"""What the modules that test Triton kernels in the interpreter have in common: how they run their cases."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping

import torch

Cases = Mapping[str, Callable[[], None]]


def run_cases(cases: Cases, sweep: Cases | None = None) -> int:
    """Prints a line per case, "ok ..." or "FAILED ..."; the exit status. With --sweep those of `sweep` run instead."""
    failed = 0
    for name, case in (sweep if sweep is not None and "--sweep" in sys.argv[1:] else cases).items():
        torch.manual_seed(0)
        try:
            case()
            print(f"ok {name}", flush=True)
        # Whatever a kernel or the interpreter raises: the other cases are still worth having.
        except Exception:
            failed += 1
            print(f"FAILED {name}: {traceback.format_exc()}", flush=True)
    return 1 if failed else 0
