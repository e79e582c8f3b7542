"""Decode steps that are recorded on the CPU when a batch size first occurs, and replayed from C++ afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from services.executor.loader import load_model
from services.executor.model_runner import ModelRunner
from services.executor.models.decoder import DecoderModel
from tests.services.executor.stepping import (
    CPU,
    GREEDY,
    LIMITS,
    Driver,
    alone,
    check_random_steps,
    graph_steps,
    prompt,
    tiny_llama,
)

if kernels.cpu_backend() != "cpp":
    pytest.skip("there is no C++ compiler: steps are not recorded", allow_module_level=True)

from services.executor.recorded_steps import RecordedSteps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def recorded_driver(model: DecoderModel, max_size: int = LIMITS.max_num_seqs) -> Driver:
    runner = ModelRunner(model, LIMITS, 64, CPU, graphs=RecordedSteps(max_size))
    for layer in model.layers:
        layer.attention.attention.kv_cache.fill_(float("nan"))
    return Driver(runner, 64)


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_recording_changes_no_token(model: DecoderModel, data: st.DataObject) -> None:
    """Requests that come, decode in every number and order, and leave: recorded, replayed and eager steps mix."""
    driver = recorded_driver(model, data.draw(st.integers(0, LIMITS.max_num_seqs)))
    check_random_steps(model, driver, data.draw(st.integers(0, 2**32)))


def test_which_steps_are_replayed(model: DecoderModel) -> None:
    driver = recorded_driver(model, max_size=3)
    for request_id in range(4):
        driver.add(request_id, prompt(3, seed=request_id))
    before = {mode: graph_steps(mode) for mode in ("captured", "replayed", "eager")}
    driver.step(dict.fromkeys(range(4), 3))  # no decode step
    driver.step(dict.fromkeys(range(4), 1))  # too large
    driver.step(dict.fromkeys(range(3), 1))
    driver.step(dict.fromkeys((3, 1, 0), 1))
    driver.step(dict.fromkeys(range(2), 1))
    assert {mode: graph_steps(mode) - before[mode] for mode in before} == {"captured": 2, "replayed": 1, "eager": 2}


def test_what_cannot_be_recorded_runs_eagerly(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that branches on a number it computed."""
    forward = model.forward

    def branching(*args: Any) -> Tensor:
        hidden = forward(*args)
        return hidden if hidden.float().sum().item() > 0 else hidden * 1

    driver = recorded_driver(model)
    monkeypatch.setattr(model, "forward", branching)
    driver.add(0, prompt(5))
    before = graph_steps("replayed"), graph_steps("eager")
    driver.step({0: 5})
    for _ in range(4):
        driver.step({0: 1})
    monkeypatch.undo()
    assert driver.tokens[0] == alone(model, prompt(5), 5, GREEDY)
    assert graph_steps("replayed") >= before[0]


@pytest.mark.parametrize("quantization", [None, "none"], ids=["4 bits", "bf16"])
def test_steps_of_the_default_model_are_replayed(smollm2_gguf: Path, quantization: str | None) -> None:
    """Nothing in them depends on what Python sees, and replays give the tokens of eager steps."""
    model = load_model(smollm2_gguf, dtype="bfloat16", device=CPU, max_model_len=128, quantization=quantization)
    before, tokens = graph_steps("replayed"), []
    for graphs in (None, RecordedSteps(4)):
        driver = Driver(ModelRunner(model, LIMITS, 64, CPU, graphs=graphs), 64)
        for request_id in range(3):
            driver.add(request_id, prompt(9 + request_id, seed=request_id))
        driver.step({0: 9, 1: 10, 2: 11})
        for _ in range(5):
            driver.step(dict.fromkeys(range(3), 1))
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
    assert graph_steps("replayed") == before + 4
