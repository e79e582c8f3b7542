"""Drafting where the host may not look at what is drafted, as on a GPU: with C++ kernels, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.services.executor.graphs.cuda_graphs import Function
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_graphs
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.far_memory import far_memory
from tests.services.executor.helpers.stepping import CPU, LIMITS, Driver, prompt
from tests.services.executor.triton.speculation import METHODS, NUM_BLOCKS, NUM_DRAFTS, generate, make


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_and_drafts_are_the_same(tmp_path: Path, method: str) -> None:
    """Runs two steps in flight: what the first gains decides on the device where the second drafts."""
    tokens, drafts = generate(tmp_path, method, depth=1)
    with far_memory():
        far_tokens, far_drafts = generate(tmp_path, method, depth=2)
    for far, near in zip(far_tokens, tokens, strict=True):
        both = min(len(far), len(near))
        assert both > 3 and far[:both] == near[:both]
    if method != "ngram":  # which drafts nothing where it finds nothing, if the host may know it
        assert (far_tokens, far_drafts) == (tokens, drafts)


def test_reading_on_the_host_is_caught(tmp_path: Path) -> None:
    """Reads rows on the host, as code for a CPU does: otherwise the test above could not fail."""
    with pytest.raises(AssertionError, match="would wait for the device"):
        generate(tmp_path, "draft_model", depth=2)


@pytest.mark.parametrize("method", METHODS)
def test_all_that_a_drafter_computes_is_replayed(tmp_path: Path, method: str) -> None:
    """Whatever numbers of drafts are asked for, and however many tokens it missed before."""
    replays = 0

    class Counted(ReplayedFunction):
        def replay(self) -> None:
            nonlocal replays
            replays += 1
            super().replay()

    def record(function: Function) -> Counted:
        return Counted(function)

    with far_memory():
        model, proposer = make(tmp_path, method)
        runner = assemble(model, LIMITS, NUM_BLOCKS, CPU, proposer=proposer)
        capture_graphs(runner, (1, 2, 4), lambda fraction, text: None, record, prompts=(24, 40))
        driver = Driver(runner, NUM_BLOCKS)
        for request_id in range(2):
            driver.add(request_id, prompt(6, seed=request_id))
        driver.step({0: 6, 1: 6})
        replays = 0
        both_in_flight = [driver.launch({0: 1 + NUM_DRAFTS, 1: 2}, {0: NUM_DRAFTS, 1: 1}) for _ in range(2)]
        for output in both_in_flight:
            driver.collect(output)
        models = 1 if method == "ngram" else 1 + NUM_DRAFTS
        assert replays == 2 * 2 * models, "of the model's and of each round: the forward pass, and the sampling"
        driver.add(2, prompt(35, seed=2))
        replays = 0
        driver.step({0: 1, 2: 35})
        driver.step({0: 1, 2: 1})
    reads_prompts = method in ("draft_model", "eagle3")
    assert replays == 3 + reads_prompts, "two forward passes and a sampling; the prompt in the drafter's cache"
