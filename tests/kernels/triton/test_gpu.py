"""Every kernel family on a GPU, against the reference: `pytest -m gpu`.

The cases are those that run in Triton's interpreter elsewhere; each module is a process of its own, so that an illegal
access is that module's failure alone.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.gpu.parts import FAMILIES, REPLAYED
from tests.kernels.processes import ROOT, run_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_the_references(family: str) -> None:
    run_module(f"triton.{family}", "--device", "cuda", TRITON_INTERPRET="0")


@pytest.mark.parametrize("kernel", REPLAYED)
def test_replays_leave_values_and_counters_as_they_were(kernel: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.smoke", kernel]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
