"""Runs every product in Triton once, in several processes beside each other: to fill Triton's cache of kernels.

`python -m benchmarks.gpu.compile_ahead 3 12 w4a16,fp8` does the third of twelve parts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.cases.product_cases import cases, series
from benchmarks.gpu.measure import Call
from benchmarks.gpu.peer_kernels.products import COMPILED_BY_TRITON

_MAX_PROCESSES = 12


def compile_ahead(groups: Sequence[str], small: bool, timeout: float) -> tuple[float, str]:
    """Seconds that it took, and a line about it. After `timeout` seconds what is left compiles when it is measured."""
    started = time.monotonic()
    count = max(1, min(_MAX_PROCESSES, (os.cpu_count() or 2) - 2))
    arguments = [str(count), ",".join(groups), "small" if small else "all"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.compile_ahead", str(part), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in range(count)
    ]
    late = 0
    for process in processes:
        try:
            process.wait(max(0.0, started + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late += 1
    seconds = time.monotonic() - started
    text = f"compiled in {count} processes, {seconds:.0f} s"
    return seconds, text + (f"; {late} of them were not done in {timeout:.0f} s" if late else "")


def compile_part(part: int, count: int, groups: Sequence[str], small: bool) -> None:
    """Calls every contestant of every `count`th weight once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = [(one, shape) for one in series(groups, small) for shape in one.shapes]
    for one, shape in pairs[part::count]:
        compiled = replace(one, peers=tuple(peer for peer in one.peers if peer in COMPILED_BY_TRITON))
        for case in cases(compiled, shape, device):
            try:
                contestants = case.build().contestants.values()
            # What does not compile is reported when it is measured.
            except Exception:
                continue
            for contestant in contestants:
                _try(contestant.calls[0])
    if device.type == "cuda":
        torch.cuda.synchronize()


def _try(call: Call) -> None:
    try:
        call()
    except Exception:  # as above
        return


if __name__ == "__main__":
    compile_part(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4] == "small")
