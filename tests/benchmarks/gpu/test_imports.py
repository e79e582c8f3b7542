"""A machine with a GPU may lack what a server needs: the benchmarks run without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# What an image for training has not: torch, triton, transformers, numpy, protobuf and grpcio it has.
LACKING = (
    "fastapi", "gguf", "grpc_health", "grpc_reflection", "httptools", "llguidance", "msgspec", "multipart",
    "opentelemetry", "pydantic", "uvicorn",
)  # fmt: skip
MODULES = (
    "benchmarks.gpu.__main__",
    "benchmarks.gpu.engine.bench",
    "benchmarks.gpu.engine.loads",
    "benchmarks.gpu.engine.real",
    "benchmarks.gpu.kernels",
    "benchmarks.gpu.quantized",
    "benchmarks.gpu.smoke",
    "benchmarks.gpu.speculation",
    "benchmarks.kernels.tune",
)
PROGRAM = """
import importlib, sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
for module in sys.argv[2:]:
    importlib.import_module(module)
"""


# What is measured of kernels alone, and tuned, needs no stubs of the services, which may be too new for a machine.
WITHOUT_STUBS = ("benchmarks.gpu.__main__", "benchmarks.gpu.kernels", "benchmarks.gpu.smoke", "benchmarks.kernels.tune")


def test_kernels_need_no_protobuf() -> None:
    assert_imported((*LACKING, "google"), WITHOUT_STUBS)


def test_they_import_only_what_such_an_image_has() -> None:
    assert_imported(LACKING, MODULES)


def assert_imported(lacking: Sequence[str], modules: Sequence[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, ",".join(lacking), *modules]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
