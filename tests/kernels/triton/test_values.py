"""The values of Triton kernels in the interpreter, without a GPU."""

from __future__ import annotations

import pytest

from tests.kernels.processes import run_module

pytest.importorskip("triton", reason="triton is not installed")

# Minutes on a machine that is busy otherwise.
pytestmark = pytest.mark.timeout(900)

# Modules with a sweep of random cases beside those that always run.
SWEPT = ["attention", "elementwise", "grouped", "sampling", "scaled_product", "split_plan", "step_inputs"]
OTHERS = ["bf16", "encoder", "experts", "latent", "quantize_input", "skinny", "state_space"]


@pytest.mark.parametrize("module", [*SWEPT, *OTHERS])
def test_values_in_the_interpreter(module: str) -> None:
    run_module(f"triton.{module}", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", SWEPT)
def test_sweep_in_the_interpreter(module: str) -> None:
    run_module(f"triton.{module}", "--sweep", timeout=3500, TRITON_INTERPRET="1")
