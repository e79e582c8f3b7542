"""The cases of modules that test Triton kernels, and how they run.

Without TRITON_INTERPRET, `--device cuda` runs the same cases on a GPU. Those of several modules run in one process,
which has to import torch and Triton once only, and prints "module <name>" before the lines of each module:

    TRITON_INTERPRET=1 python -m tests.kernels.triton.interpreted attention elementwise ...
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any
from unittest import mock

import torch

from tests.sweep import IS_FULL

Cases = Mapping[str, Callable[[], None]]


def some_of(cases: Cases, num: int = 2) -> Cases:
    """Returns `num` of these variants, from the first to the last; in the full sweep all of them."""
    names = list(cases)
    if IS_FULL or len(names) <= num:
        return cases
    chosen = (names[index * (len(names) - 1) // (num - 1)] for index in range(num))
    return {name: cases[name] for name in chosen}


def run_cases(cases: Cases, sweep: Cases | None = None) -> int:
    """Prints a line per case, "ok ..." or "FAILED ..."; the exit status. With --sweep those of `sweep` run instead;
    with --part 2/4 every fourth, from the second on."""
    failed = 0
    device, part = _option("--device", "cpu"), _option("--part", "1/1")
    chosen = sweep if sweep is not None and "--sweep" in sys.argv[1:] else cases
    with quick_interpreter(), on_device(device):
        for name, case in part_of(chosen, part).items():
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


def _option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def part_of(cases: Cases, part: str) -> Cases:
    """Returns the cases of a part, as 2/4: so that neighbours, which are alike, are in different parts."""
    number, count = map(int, part.split("/"))
    return dict(islice(cases.items(), number - 1, None, count))


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Takes from the interpreter what it does needlessly, half of its time; what kernels compute stays the same.

    It searches Triton's language for what to patch in every call of a function, and finds nothing after the first of a
    launch. It computes whether sums and products of integers overflow, and looks at that in its debug mode alone.
    """
    from triton import language
    from triton.language.core import is_builtin
    from triton.runtime import interpreter  # not on every system

    patch_lang = interpreter._patch_lang

    @cache
    def modules_seen_by(function: Callable[..., object]) -> list[Any]:
        seen = function.__globals__.values()
        return [module for module in (language, language.core) if any(value is module for value in seen)]

    def patch_first(function: Callable[..., object]) -> Any:
        members = [*(module.load for module in modules_seen_by(function)), language.tensor.__add__]
        return patch_lang(function) if any(map(is_builtin, members)) else interpreter._LangPatchScope()

    builder = interpreter.interpreter_builder
    with (
        mock.patch.object(interpreter, "_patch_lang", patch_first),
        mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
    ):
        yield


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


def main() -> int:
    status = 0
    for name in sys.argv[1:]:
        print(f"module {name}", flush=True)
        status |= run_cases(importlib.import_module(f"tests.kernels.triton.{name}").CASES)
    return status


if __name__ == "__main__":
    sys.exit(main())
