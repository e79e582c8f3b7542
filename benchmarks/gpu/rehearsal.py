"""Rehearses the kernels' benchmark without a GPU: `python -m benchmarks.gpu.rehearsal [--only decode]`.

Cases are built in their real shapes on the CPU and called with the stand-in for a driver of `benchmarks.gpu.host_cost`:
Python, torch and Triton's launcher run as on a GPU of compute capability 9.0, and kernels are really compiled. Launches
do nothing, so the times mean nothing. The rehearsal shows which cases raise, which launches no device could run, and
how long a run will compile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from benchmarks.gpu import host_cost
from benchmarks.gpu.cases import product_cases
from benchmarks.gpu.cases.case import OURS, Case, in_turn
from benchmarks.gpu.cases.product_inputs import Fp8, Grouped, Int8
from benchmarks.gpu.kernels import GROUPS
from benchmarks.gpu.table import first_line
from pagewire.kernels import tuning
from pagewire.kernels.triton.common import launch

_CPU = torch.device("cpu")
# Contestants that are ours, too.
_OURS = (OURS, "apart", "with its plan", "free split", "bf16 KV", "q_len 1")
_ALSO_IN_TURN = ("decode", "products", "elementwise", "w4a16")  # groups of cases with ours in turn
_MULTIPROCESSORS = 132
_MOST_IN_A_GRID = (2**31 - 1, 65535, 65535)


class Device(host_cost.Device):
    """Remembers what was launched that no device can."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []
        self.launcher_cls = self._launcher

    def _launcher(self, source: Any, metadata: Any) -> Any:
        name = str(source.fn.__name__)

        def launch(*arguments: Any) -> None:
            grid = arguments[:3]
            if not all(0 < size <= most for size, most in zip(grid, _MOST_IN_A_GRID, strict=True)):
                self.refused.append(f"{name}: a grid of {grid}")
            self._launch(*arguments)

        return launch


@contextmanager
def without_numbers() -> Iterator[None]:
    """Replaces random tensors by uninitialized memory; integers are 0."""

    def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype)

    def zeros(low: int, high: Any, size: Any = None, dtype: torch.dtype = torch.int64, **_: Any) -> Tensor:
        return torch.zeros(high if size is None else size, dtype=dtype)

    with ExitStack() as patches:
        for name, function in (("randn", empty), ("rand", empty), ("randint", zeros)):
            patches.enter_context(mock.patch.object(torch, name, function))
        patches.enter_context(mock.patch.object(Tensor, "normal_", lambda tensor, *_, **__: tensor))
        for form in (Grouped, Fp8, Int8):
            patches.enter_context(mock.patch.object(form, "expected", lambda *_: ()))
        yield


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Makes kernels compile and launch as if their tensors were on CUDA."""
    with (
        mock.patch.object(Tensor, "is_cuda", property(lambda tensor: True), create=True),
        mock.patch.object(launch, "_launches_early", lambda device: True),
        mock.patch.object(tuning, "INTERPRETED_MULTIPROCESSORS", _MULTIPROCESSORS),
    ):
        tuning.num_multiprocessors.cache_clear()
        yield
    tuning.num_multiprocessors.cache_clear()


def cases_of(group: str) -> Iterator[Case]:
    """Yields the cases of a group; of quantized products two shapes, as others are launched like these."""
    if group == "w4":
        yield from product_cases.w4_cases(_CPU, False, peers=())
    elif group in GROUPS:
        yield from GROUPS[group](_CPU, False)
    else:
        for one in product_cases.series([group], small=False):
            for shape in one.shapes[:2]:
                yield from product_cases.cases(replace(one, peers=()), shape, _CPU)


def rehearse(case: Case, device: Device) -> list[str]:
    """Builds it and calls what is ours once; what was wrong."""
    device.refused.clear()
    try:
        contestants = case.build().contestants
        for name in _OURS:
            if name in contestants:
                contestants[name].calls[0]()
        if case.group in _ALSO_IN_TURN:
            in_turn(contestants[OURS].calls).calls[0]()
    # Whatever a launcher or a compiler raises is what this is for.
    except Exception as error:
        return [f"{type(error).__name__}: {first_line(error)}"]
    return list(device.refused)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = (*GROUPS, *product_cases.GROUPS)
    parser.add_argument("--only", default=",".join(known), help=f"groups, comma separated, of: {', '.join(known)}")
    groups = parser.parse_args().only.split(",")
    if unknown := set(groups) - set(known):
        parser.error(f"--only: no group {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    device, compiling = Device(), Compiling()
    failed = 0
    print(f"Triton {triton.__version__}, torch {torch.__version__}", flush=True)
    with (
        host_cost.standing_in(device, own_products=True),
        as_on_cuda(),
        without_numbers(),
        compiling,
        torch.inference_mode(),
    ):
        for group in groups:
            num_cases, wrong = 0, list[str]()
            before = compiling.count, compiling.seconds
            for case in cases_of(group):
                num_cases += 1
                wrong += [f"{case.name}: {what}" for what in rehearse(case, device)]
            count, seconds = compiling.count - before[0], compiling.seconds - before[1]
            said = f"{num_cases} cases, {count} kernels compiled in {seconds:.0f} s, {len(wrong)} wrong"
            print(f"{group}: {said}", flush=True)
            print("".join(f"FAILED {group} {line}\n" for line in wrong), end="", flush=True)
            failed += len(wrong)
    return int(failed > 0)


class Compiling:
    """Counts what Triton compiles, its cache aside, and the seconds of it."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._compile = triton.compiler.compile

    def __enter__(self) -> Compiling:
        self._patches = [
            mock.patch.object(module, "compile", self._timed) for module in (triton.compiler, triton.compiler.compiler)
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _timed(self, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._compile(*arguments, **options)
        finally:
            self.count += 1
            self.seconds += time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
