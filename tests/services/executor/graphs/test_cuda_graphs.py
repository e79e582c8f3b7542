"""Steps through recorded graphs, with a stand-in for the device's: a graph that calls its function again.

Like a CUDA graph it does nothing when it is recorded, reads and writes the memory that it was recorded with, and
always gives its result in the same tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire.kernels import ops
from pagewire.services.executor import stats
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.graphs.capture_sizes import graph_shapes
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Function
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_graphs
from tests.services.executor.helpers.stepping import (
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
from tests.sweep import examples

SIZES = (1, 2, 4, 7)
PROMPTS = (8, 16, 24, 40, 64, 128)


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


def graph_driver(model: DecoderModel, prompts: Sequence[int] = ()) -> Driver:
    """The KV cache holds NaN wherever no request has written, after the capture too."""
    runner = assemble(model, LIMITS, 64, CPU)
    capture_graphs(runner, SIZES, lambda fraction, text: None, ReplayedFunction, prompts)
    for layer in model.attention_layers:
        layer.kv_cache.fill_(float("nan"))
    return Driver(runner, 64)


@given(st.data())
@settings(max_examples=examples(12), deadline=None)
def test_graphs_change_no_token(model: DecoderModel, data: st.DataObject) -> None:
    """Requests that come, decode in every number and order, and leave: padded, exact and eager batches mix."""
    driver = graph_driver(model, data.draw(st.sampled_from(((), PROMPTS, PROMPTS[:3]))))
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


def test_which_steps_with_prompts_are_replayed(model: DecoderModel) -> None:
    driver = graph_driver(model, PROMPTS[:-1])
    for request_id, length in enumerate((20, 40, 3, 90)):
        driver.add(request_id, prompt(length, seed=request_id))
    replayed, eager = graph_steps("replayed"), graph_steps("eager")
    driver.step({0: 20, 1: 17, 2: 3})  # long queries and a short one
    driver.step({0: 1, 1: 23, 2: 1})  # beside decodes
    driver.step({0: 1, 3: 5})  # short ones alone
    driver.step({3: 60})  # a long one alone
    assert (graph_steps("replayed"), graph_steps("eager")) == (replayed + 4, eager)
    driver.add(4, prompt(50, seed=4))
    driver.step({4: 50, 3: 25})  # more tokens than the largest size
    assert graph_steps("eager") == eager + 1
    for request_id, num_tokens in ((0, 3), (1, 1), (2, 2), (3, 1), (4, 1)):
        length = (20, 40, 3, 90, 50)[request_id]
        assert driver.tokens[request_id] == alone(model, prompt(length, seed=request_id), num_tokens)


@pytest.mark.parametrize("prompts", [(), PROMPTS], ids=["eager", "graphs"])
def test_attention_launches_no_kernel_for_queries_that_there_are_not(
    model: DecoderModel, prompts: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns how kernels are chosen by the shortest and the longest query that a layer's call says."""
    driver = graph_driver(model, prompts)
    calls = list[tuple[bool, bool]]()
    attend = ops.paged_attention

    def spy(*arguments: Any) -> Tensor:
        longest, shortest = arguments[5:7]
        calls.append((shortest <= ops.SHORT_QUERY, longest > ops.SHORT_QUERY))
        return attend(*arguments)

    monkeypatch.setattr(ops, "paged_attention", spy)

    def kernels(scheduled: Mapping[int, int]) -> tuple[bool, bool]:
        """Returns whether the kernel for short queries is launched, and the one for long ones."""
        calls.clear()
        driver.step(scheduled)
        assert len(calls) == len(model.attention_layers) and len(set(calls)) == 1
        return calls[0]

    for request_id in range(3):
        driver.add(request_id, prompt(50, seed=request_id))
    assert kernels({0: 50, 1: 20}) == (False, True)
    assert kernels({0: 1, 1: 30, 2: 2}) == (True, True)
    assert kernels({0: 1, 1: 1, 2: 5}) == (True, False)
    assert kernels({0: 1, 1: 1}) == (True, False)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=8).filter(lambda lens: sum(lens) <= 128),
    st.data(),
)
def test_padded_shapes_hold_what_they_are_for(lens: list[int], data: st.DataObject) -> None:
    graphs = CudaGraphs()
    for captured in graph_shapes(SIZES, LIMITS, 0, PROMPTS, with_adapters=True):
        step = partial(graphs.run, "forward", captured, partial(torch.empty, captured.num_tokens, 1))
        graphs.capture(captured, ReplayedFunction, step)
    num_sampled = data.draw(st.integers(0, len(lens)))
    shape = BatchShape(len(lens), sum(lens), num_sampled, max(lens), min(lens), data.draw(st.booleans()))
    padded = graphs.padded(shape)
    assert padded.num_tokens >= shape.num_tokens and padded.num_reqs >= shape.num_reqs
    assert padded.num_reqs > shape.num_reqs or padded.num_tokens == shape.num_tokens  # one request has the padding
    assert padded.max_query_len >= shape.max_query_len and padded.min_query_len <= shape.min_query_len
    assert padded.num_sampled >= shape.num_sampled
    assert padded.has_adapters == shape.has_adapters


class Nothing(ReplayedFunction):
    """Counts how often it is replayed, in the place of what it was recorded of."""

    times = 0

    def __init__(self, function: Function) -> None:
        self.output = function()

    def replay(self) -> None:
        Nothing.times += 1


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition("::")[2])
        return func(*args, **kwargs or {})


def test_captured_graphs_are_counted(model: DecoderModel) -> None:
    runner, captured = assemble(model, LIMITS, 64, CPU), stats.CUDA_GRAPHS.labels("captured")
    before = captured._value.get()
    capture_graphs(runner, SIZES, lambda fraction, text: None, ReplayedFunction, PROMPTS)
    assert captured._value.get() - before == len(graph_shapes(SIZES, LIMITS, 0, PROMPTS))


def test_a_step_with_prompts_is_one_launch_and_what_samples(model: DecoderModel) -> None:
    """Whatever the model's layers are."""
    driver = Driver(assemble(model, LIMITS, 64, CPU), 64)
    capture_graphs(driver.runner, SIZES, lambda fraction, text: None, Nothing, PROMPTS)
    driver.add(0, prompt(20))
    driver.add(1, prompt(60, seed=1))
    driver.launch({0: 20})
    times = Nothing.times
    with Called() as called:
        driver.launch({0: 1, 1: 40})
    assert Nothing.times == times + 1
    kernels = [name for name in called.names if name in ops.DEFINITIONS]
    assert kernels == ["linear", "sample_tokens"]  # of the output projection
    assert len(called.names) < 20
    called = Called()
    with called:
        driver.launch({1: 10})  # nothing is sampled
    assert Nothing.times == times + 2
    assert not set(called.names) & set(ops.DEFINITIONS) and len(called.names) < 10
