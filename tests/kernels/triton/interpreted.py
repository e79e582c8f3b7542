"""The cases of modules that test Triton kernels, and how they run.

Without TRITON_INTERPRET, `--device cuda` runs the same cases on a GPU.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from tests.sweep import IS_FULL

Cases = Mapping[str, Callable[[], None]]


def some_of(cases: Cases, num: int = 3) -> Cases:
    """Returns `num` of these variants, from the first to the last; in the full sweep all of them."""
    names = list(cases)
    if IS_FULL or len(names) <= num:
        return cases
    chosen = (names[index * (len(names) - 1) // (num - 1)] for index in range(num))
    return {name: cases[name] for name in chosen}


def run_cases(cases: Cases, sweep: Cases | None = None) -> int:
    """Prints a line per case, "ok ..." or "FAILED ..."; the exit status. With --sweep those of `sweep` run instead."""
    failed = 0
    device = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"
    with on_device(device):
        for name, case in (sweep if sweep is not None and "--sweep" in sys.argv[1:] else cases).items():
            torch.manual_seed(0)
            try:
                case()
                if device != "cpu":
                    torch.cuda.synchronize()  # what a launch did wrong is this case's
                print(f"ok {name}", flush=True)
            # Whatever a kernel or the interpreter raises: the other cases are still worth having.
            except Exception as error:
                failed += 1
                print(f"FAILED {name}: {type(error).__name__}: {error}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


@contextmanager
def nothing_computed() -> Iterator[None]:
    """Skips kernels that are launched within. Where their values are not read, as while graphs are captured, the
    interpreter would take most of a test's time for them."""
    from triton.runtime.interpreter import GridExecutor  # not on every system

    with mock.patch.object(GridExecutor, "__call__", lambda *args, **kwargs: None):
        yield


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Tensors that are made within are there, and what draws their numbers, too."""
    if device == "cpu":
        yield
        return
    with torch.device(device), mock.patch.object(torch, "Generator", partial(torch.Generator, device)):
        yield
