"""Modules that check Triton kernels in a process of their own: Triton decides when a kernel is defined whether it is
interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_module(module: str, *arguments: str, timeout: float = 880, **environment: str) -> None:
    """Runs `tests.kernels.<module>`, which prints a line per case, "ok ..." or "FAILED ...", and fails with those that
    failed."""
    result = _finished(module, arguments, timeout, environment)
    lines = result.stdout.splitlines()
    failures = [line for line in lines if not line.startswith("ok ")]
    assert result.returncode == 0, "\n".join([*failures, result.stderr[-4000:]])
    assert lines and not failures


def output_of(module: str, *arguments: str, timeout: float = 880, **environment: str) -> str:
    """Returns what `tests.kernels.<module>` prints; fails if a signal ends it."""
    result = _finished(module, arguments, timeout, environment)
    print(result.stderr[-4000:])
    assert result.returncode in (0, 1), result.stderr[-4000:]
    return result.stdout


def _finished(
    module: str, arguments: Sequence[str], timeout: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
