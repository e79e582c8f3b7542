"""Decode steps through recorded graphs, with a stand-in for the device's: a graph that calls its function again.

Like a CUDA graph it does nothing when it is recorded, reads and writes the memory that it was recorded with, and
always gives its result in the same tensor.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.services.executor.cuda_graphs import Function
from pagewire.services.executor.graph_capture import capture_graphs
from pagewire.services.executor.model_runner import ModelRunner
from pagewire.services.executor.models.decoder import DecoderModel
from tests.services.executor.stepping import (
    CPU,
    LIMITS,
    SEEDED,
    Driver,
    alone,
    check_random_steps,
    graph_steps,
    prompt,
    tiny_llama,
)

SIZES = (1, 2, 4, 7)


class ReplayedFunction:
    output: Tensor

    def __init__(self, function: Function) -> None:
        self._function = function

    def replay(self) -> None:
        result = self._function()
        if hasattr(self, "output"):
            self.output.copy_(result)
        else:
            self.output = result.clone()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def graph_driver(model: DecoderModel) -> Driver:
    """The KV cache holds NaN wherever no request has written, after the capture too."""
    runner = ModelRunner(model, LIMITS, 64, CPU)
    capture_graphs(runner, SIZES, lambda fraction, text: None, ReplayedFunction)
    for layer in model.attention_layers:
        layer.kv_cache.fill_(float("nan"))
    return Driver(runner, 64)


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_graphs_change_no_token(model: DecoderModel, data: st.DataObject) -> None:
    """Requests that come, decode in every number and order, and leave: padded, exact and eager batches mix."""
    driver = graph_driver(model)
    check_random_steps(model, driver, data.draw(st.integers(0, 2**32)))


def test_which_steps_are_replayed(model: DecoderModel) -> None:
    captured = graph_steps("captured")
    driver = graph_driver(model)
    assert graph_steps("captured") == captured + len(SIZES)
    for request_id in range(8):
        driver.add(request_id, prompt(3, seed=request_id))
    replayed, eager = graph_steps("replayed"), graph_steps("eager")
    driver.step(dict.fromkeys(range(8), 3))
    driver.step(dict.fromkeys(range(8), 1))  # more than the largest size
    assert (graph_steps("replayed"), graph_steps("eager")) == (replayed, eager + 2)
    driver.step(dict.fromkeys(range(7), 1))
    driver.step(dict.fromkeys(range(3), 1))
    assert (graph_steps("replayed"), graph_steps("eager")) == (replayed + 2, eager + 2)


def test_padding_touches_no_other_row(model: DecoderModel) -> None:
    """A batch of 5 runs as 7; the rows that do not run keep their tokens and go on as if nothing had happened."""
    driver = graph_driver(model)
    for request_id in range(8):
        driver.add(request_id, prompt(4, seed=request_id), SEEDED)
    driver.step(dict.fromkeys(range(8), 4))
    for _ in range(9):
        driver.step(dict.fromkeys(range(5), 1))
    for _ in range(3):
        driver.step(dict.fromkeys((7, 5), 1))
    for request_id, num_tokens in ((0, 10), (4, 10), (5, 4), (7, 4)):
        assert driver.tokens[request_id] == alone(model, prompt(4, seed=request_id), num_tokens, SEEDED)


def test_pipelined_results_survive_the_next_replay(model: DecoderModel) -> None:
    driver = graph_driver(model)
    driver.add(0, prompt(5))
    outputs = [driver.launch({0: 5}), *(driver.launch({0: 1}) for _ in range(6))]
    for output in outputs:
        driver.collect(output)
    assert driver.tokens[0] == alone(model, prompt(5), 7)
