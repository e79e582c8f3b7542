"""The machine: its device, clocks and versions. Imports nothing that a device error could end."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "numpy", "protobuf", "grpcio", "safetensors", "tokenizers", "gguf")
_FACTS = (
    "name", "driver_version", "memory.total", "memory.used", "clocks.max.sm", "clocks.max.mem", "power.limit",
    "ecc.mode.current", "mig.mode.current",
)  # fmt: skip
_STATE = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")


def describe() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": _query(_FACTS),
        "commit": _said(["git", "rev-parse", "--short", "HEAD"]),
    }


def clocks() -> dict[str, str]:
    """Returns the present clocks of the device."""
    return _query(_STATE)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _query(fields: tuple[str, ...]) -> dict[str, str]:
    line = _said(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    values = line.splitlines()[0].split(", ") if line else []
    return dict(zip(fields, values, strict=False))


def _said(command: list[str]) -> str:
    """Its output, "" if it cannot be had."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
