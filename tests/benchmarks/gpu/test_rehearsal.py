"""The rehearsal shows without a GPU what would fail on one: kernels are compiled and launched in their real shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import sys

import torch
import triton

from benchmarks.gpu import rehearsal
from benchmarks.gpu.cases.case import OURS, Built, Case, Contestant


@triton.jit
def nothing():
    pass


def case(name, call):
    return Case("broken", name, 0, lambda: Built({OURS: Contestant([call], None)}))


def broken(device, small):
    yield case("right", lambda: nothing[(1, 65535)]())
    yield case("programs", lambda: nothing[(1, 65536)]())
    yield case("shapes", lambda: torch.zeros(2) + torch.zeros(3))


rehearsal.GROUPS["broken"] = broken
sys.argv = ["rehearsal", "--only", "step,broken"]
sys.exit(rehearsal.main())
"""


@pytest.mark.slow
def test_what_cannot_be_launched_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # Triton reads a kernel's source
    program.write_text(PROGRAM)
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": str(Path(__file__).parents[3]), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=300, env=environ
    )
    assert result.returncode == 1, result.stderr[-2000:]
    _, step, broken, programs, shapes = result.stdout.splitlines()
    assert step.startswith("step: 2 cases, 2 kernels compiled in ") and step.endswith(", 0 wrong")
    assert broken.startswith("broken: 3 cases, 1 kernels compiled in ") and broken.endswith(", 2 wrong")
    assert programs == "FAILED broken programs: nothing: a grid of (1, 65536, 1)"
    assert shapes.startswith("FAILED broken shapes: RuntimeError: ")
