"""The parts of `make chaos` are there; the line that runs them is not part of the suite."""

import argparse
import importlib.util

from tests.chaos.__main__ import parts


def test_each_part_is_a_module() -> None:
    args = argparse.Namespace(seed=1, schedules=10, model_schedules=1, fuzz_cases=1, soak_minutes=1.0)
    modules = [module for _, module, _ in parts(args)]
    assert modules and all(importlib.util.find_spec(f"tests.chaos.{module}") for module in modules)
