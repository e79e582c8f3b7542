"""The Triton kernels without a GPU: their values in the interpreter, their resources by compiling ahead of time.

Each module runs in a process of its own: Triton decides when a kernel is defined whether it is interpreted.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.kernels import aot
from benchmarks.kernels.compiler import ARCHITECTURES
from benchmarks.kernels.specializations import (
    VERIFIED_HEAD_DIMS,
    all_forms,
    attention,
    attention_form,
    attention_key,
)

ROOT = Path(__file__).parents[2]
# Modules with a sweep of random cases beside those that always run.
SWEPT = [
    "triton_attention",
    "triton_elementwise",
    "triton_grouped",
    "triton_sampling",
    "triton_scaled_product",
    "triton_split_plan",
    "triton_step_inputs",
]


def run_module(module: str, *arguments: str, timeout: float = 280, **environment: str) -> None:
    """Fails with what failed. A module prints a line per case, "ok ..." or "FAILED ..."."""
    result = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    lines = result.stdout.splitlines()
    failures = [line for line in lines if not line.startswith("ok ")]
    assert result.returncode == 0, "\n".join([*failures, result.stderr[-4000:]])
    assert lines and not failures


@pytest.mark.parametrize(
    "module",
    [
        *SWEPT,
        "triton_bf16",
        "triton_encoder",
        "triton_experts",
        "triton_latent",
        "triton_quantize_input",
        "triton_skinny",
        "triton_state_space",
    ],
)
def test_values_in_the_interpreter(module: str) -> None:
    run_module(module, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", SWEPT)
def test_sweep_in_the_interpreter(module: str) -> None:
    run_module(module, "--sweep", timeout=3500, TRITON_INTERPRET="1")


def test_ahead_of_time_compilation() -> None:
    run_module("triton_aot", TRITON_INTERPRET="0")


def test_kernels_that_begin_early_wait_for_their_inputs() -> None:
    run_module("triton_launch", TRITON_INTERPRET="0")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ahead_of_time_compilation_of_every_form() -> None:
    run_module("triton_aot", "--all", timeout=3500, TRITON_INTERPRET="0")


def test_record_of_compiled_forms_is_of_this_code() -> None:
    compiled = {(capability, *form) for capability in ARCHITECTURES for form in all_forms(capability)}
    assert aot.recorded().keys() == compiled, "forms have changed: run python -m benchmarks.kernels aot"


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_attention_of_any_number_of_drafts_is_among_the_compiled_forms(capability: int) -> None:
    compiled = {attention_key(form) for form in attention(capability)}
    groups, lens = (1, 2, 3, 4, 5, 6, 7, 8, 16), range(2, 17)
    for head_dim, kv_bytes, group, query_len in itertools.product(VERIFIED_HEAD_DIMS, (1, 2), groups, lens):
        shape = {"head_dim": head_dim, "kv_bytes": kv_bytes, "block_size": 16, "group": group, "batch": 8}
        form = attention_form("decode_attention", capability, shape | {"query_len": query_len})
        assert attention_key(form) in compiled, (head_dim, kv_bytes, group, query_len)
