"""Fills Triton's cache with every form that tuning will try, in several processes beside each other."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Iterator, Sequence

import torch

from benchmarks.kernels.grids import forms_of
from benchmarks.kernels.problems.problem_sets import Problem, problems_of
from benchmarks.kernels.problems.problems import attention_problem
from benchmarks.kernels.search import forced
from benchmarks.kernels.shapes import CONTEXTS, TINY_CONTEXT, Shape, tuned_shapes
from pagewire.kernels import tuning

_MAX_PROCESSES = 12
# What a form does not depend on: one shape stands for all that differ in these.
_OF_A_LAUNCH = ("batch", "context", "outputs", "inputs")


def compile_ahead(worker: Sequence[str], seconds: float) -> None:
    """Compiles forms in several processes. worker: the command that tunes. The rest compiles when it is measured."""
    end, count = time.monotonic() + seconds, max(1, min(_MAX_PROCESSES, (os.cpu_count() or 2) - 2))
    processes = [
        subprocess.Popen(
            [*worker, "--compile-part", str(part), str(count)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for part in range(count)
    ]
    late = 0
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            late += 1
    took = seconds - (end - time.monotonic())
    print(f"compiled in {count} processes, {took:.0f} s; {late} of them were not done", flush=True)


def compile_part(arguments: argparse.Namespace) -> int:
    """Calls every `count`th configuration once, so that each is compiled by one process."""
    part, count = arguments.compile_part
    device = torch.device(arguments.device)
    # Kernels in turn: when time runs out, the most important shapes of all are compiled.
    for kernel in arguments.kernel:
        for shape in representatives(tuned_shapes(kernel, arguments.shapes, tuning.capability_of(device))):
            _compile(kernel, shape, device, part, count)
    return 0


def representatives(shapes: Sequence[Shape]) -> Iterator[Shape]:
    """One shape, the smallest, of all that need the same forms."""
    found: dict[tuple[tuple[str, int], ...], Shape] = {}
    for shape in sorted(shapes, key=lambda shape: [shape.get(key, 0) for key in _OF_A_LAUNCH]):
        found.setdefault(tuple((key, value) for key, value in shape.items() if key not in _OF_A_LAUNCH), shape)
    return iter(found.values())


def _compile(kernel: str, shape: Shape, device: torch.device, part: int, count: int) -> None:
    present = dict(tuning.lookup(kernel, tuning.capability_of(device), **shape))
    problems: Sequence[Problem]
    if kernel in CONTEXTS:
        problems = [attention_problem(shape, TINY_CONTEXT, device)]
    else:
        problems = problems_of(kernel, shape, device)
    for config in forms_of(kernel, shape, present, device.type == "cpu"):
        # By its values: the same configuration of another shape is the same process's.
        if sum(config.values()) % count != part:
            continue
        for problem in problems:
            try:
                with forced(kernel, config):
                    problem.calls()[0]()
            # What cannot be compiled is reported when it is measured.
            except Exception:
                continue
