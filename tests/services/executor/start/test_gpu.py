"""The executor on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.processes import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]


def test_logits_of_a_random_model_are_those_of_the_reference() -> None:
    """Compares tokens from eager steps, from graphs and from graphs with padding, in fp32 and bf16."""
    run("benchmarks.gpu.smoke", "executor")


def test_logits_of_the_default_model_are_those_of_the_cpu(tmp_path: Path, smollm2_gguf: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    run("benchmarks.gpu.engine.real", "--model", str(smollm2_gguf), "--out", str(tmp_path), "--small")


def test_steps_of_all_kinds_run(tmp_path: Path) -> None:
    run("benchmarks.gpu.engine.loads", "--small", "--out", str(tmp_path))
