"""Decode steps through recorded graphs, with a stand-in for the device's: a graph that calls its function again.

Like a CUDA graph it does nothing when it is recorded, reads and writes the memory that it was recorded with, and
always gives its result in the same tensor.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.executor import stats
from services.executor.cuda_graphs import Function
from services.executor.model_runner import ModelRunner
from services.executor.models.decoder import DecoderModel
from services.executor.step import RowSampling
from tests.services.executor.stepping import CPU, GREEDY, LIMITS, Driver, alone, prompt, tiny_llama

SEEDED = RowSampling(seed=11, temperature=0.9, top_p=0.9, top_k=40, min_p=0.01)
PENALIZED = RowSampling(seed=12, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=6)
WITH_LOGPROBS = replace(SEEDED, logprobs=2)
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
    runner.capture_graphs(SIZES, lambda fraction, text: None, ReplayedFunction)
    for layer in model.layers:
        layer.attention.attention.kv_cache.fill_(float("nan"))
    return Driver(runner, 64)


def steps(mode: str) -> float:
    return stats.GRAPH_STEPS.labels(mode)._value.get()


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_graphs_change_no_token(model: DecoderModel, data: st.DataObject) -> None:
    """Requests that come, decode in every number and order, and leave: padded, exact and eager batches mix."""
    kinds = [GREEDY, SEEDED, PENALIZED, WITH_LOGPROBS]
    driver = graph_driver(model)
    samplings: dict[int, RowSampling] = {}
    lengths: dict[int, int] = {}
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(25):
        scheduled = {}
        if len(samplings) < LIMITS.max_num_seqs and rng.random() < 0.5:
            request_id, length = len(samplings), int(rng.integers(1, 12))
            samplings[request_id] = kinds[request_id % len(kinds)]
            driver.add(request_id, prompt(length, seed=request_id), samplings[request_id])
            lengths[request_id] = length
            scheduled[request_id] = length
        for request_id in rng.permutation(list(samplings)).tolist():
            if request_id not in scheduled and rng.random() < 0.8:
                scheduled[request_id] = 1
        if scheduled:
            driver.step(scheduled)
    for request_id, sampling in samplings.items():
        tokens = driver.tokens[request_id]
        expected = alone(model, prompt(lengths[request_id], seed=request_id), len(tokens), sampling)
        assert tokens == expected


def test_which_steps_are_replayed(model: DecoderModel) -> None:
    captured = steps("captured")
    driver = graph_driver(model)
    assert steps("captured") == captured + len(SIZES)
    for request_id in range(8):
        driver.add(request_id, prompt(3, seed=request_id))
    replayed, eager = steps("replayed"), steps("eager")
    driver.step(dict.fromkeys(range(8), 3))
    driver.step(dict.fromkeys(range(8), 1))  # more than the largest size
    assert (steps("replayed"), steps("eager")) == (replayed, eager + 2)
    driver.step(dict.fromkeys(range(7), 1))
    driver.step(dict.fromkeys(range(3), 1))
    assert (steps("replayed"), steps("eager")) == (replayed + 2, eager + 2)


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
