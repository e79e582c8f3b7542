"""The values of Triton kernels in the interpreter, without a GPU."""

from __future__ import annotations

import pytest

from tests.kernels.processes import output_of, run_module

pytest.importorskip("triton", reason="triton is not installed")

# Minutes on a machine that is busy otherwise.
pytestmark = pytest.mark.timeout(900)

# Modules with a sweep of random cases beside those that always run.
SWEPT = ["attention", "elementwise", "grouped", "sampling", "scaled_product", "split_plan", "step_inputs"]
OTHERS = ["adapters", "collectives", "encoder", "experts", "latent", "quantize_input", "skinny", "state_space"]


@pytest.fixture(scope="module")
def reports() -> dict[str, list[str]]:
    """The lines that each module printed, by its name."""
    output = output_of("triton.interpreted", *SWEPT, *OTHERS, TRITON_INTERPRET="1")
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        if line.startswith("module "):
            name = line.removeprefix("module ")
            found[name] = []
        else:
            found[name].append(line)
    return found


@pytest.mark.parametrize("module", [*SWEPT, *OTHERS])
def test_values_in_the_interpreter(module: str, reports: dict[str, list[str]]) -> None:
    lines = reports[module]
    assert lines and [line for line in lines if not line.startswith("ok ")] == []


def test_values_of_bf16_in_the_interpreter() -> None:
    """Runs them in a process of their own, as they change the interpreter."""
    run_module("triton.bf16", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", SWEPT)
def test_sweep_in_the_interpreter(module: str) -> None:
    run_module(f"triton.{module}", "--sweep", timeout=3500, TRITON_INTERPRET="1")
