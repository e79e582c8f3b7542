"""The Triton kernels without a GPU: their values in the interpreter, their resources by compiling ahead of time.

Each runs in a process of its own: Triton decides when a kernel is defined whether it is interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]


def run_module(module: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_values_in_the_interpreter() -> None:
    result = run_module("tests.kernels.triton_cases", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert result.stdout.count("ok ") >= 15


def test_ahead_of_time_compilation(tmp_path: Path) -> None:
    result = run_module("tests.kernels.triton_aot", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert result.stdout.count("sm_90") >= 8
