"""Unpacks what travels to a GPU machine beside the repository, in `benchmarks/gpu/peers/`, if it can be used there.

- `stubs/`: protobuf as a wheel, for a machine with one that is older than the services' stubs.
- `triton/`: kernels that were compiled elsewhere, if Triton finds them there: see `triton_cache`.

Other people's kernels are loaded by `peer_kernels.files`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.gpu import triton_cache
from benchmarks.gpu.processes import ROOT

LUGGAGE = Path(__file__).parent / "peers"
STUBS = "stubs"
_IMPORT = "import pagewire.v1.common_pb2, pagewire.v1.executor_pb2"
_SECONDS = 30.0


def unpacked(
    directory: Path, luggage: Path = LUGGAGE, python: str = sys.executable
) -> tuple[dict[str, str], list[str], str]:
    """Unpacks what is needed to a directory. Returns variables for processes, a line about each, and why the services'
    stubs cannot be imported, "" if they can."""
    environment, lines = dict[str, str](), list[str]()
    fault = _import_fault(python, "")
    wheels = sorted((luggage / STUBS).glob("*.whl"))
    if fault and wheels:
        site = directory / STUBS
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        lines.append(f"stubs: {', '.join(wheel.name for wheel in wheels)} instead of what is installed, as {fault}")
        environment["PYTHONPATH"] = str(site)
        fault = _import_fault(python, str(site))
    elif fault:
        lines.append("stubs: none travelled; run python -m benchmarks.gpu.peer_kernels.fetch")
    line, variables = triton_cache.unpacked(luggage / "triton", python)
    return environment | variables, [*lines, line], fault and f"the services' stubs cannot be imported: {fault}"


def _import_fault(python: str, site: str) -> str:
    """The last line of the error that importing the services' stubs raises; "" if there is none."""
    path = os.pathsep.join(filter(None, (site, str(ROOT))))
    try:
        result = subprocess.run(
            [python, "-c", _IMPORT], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
            check=False, timeout=_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        "" if result.returncode == 0 else (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
    )
