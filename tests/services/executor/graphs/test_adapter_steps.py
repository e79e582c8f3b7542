"""Steps with adapters are never replayed from what was recorded of steps without, nor the other way round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Function


class _Graph:
    def __init__(self, function: Function) -> None:
        self.output = function()

    def replay(self) -> None:
        pass


@pytest.mark.parametrize("size", [3, 4])
def test_a_cuda_graph_serves_steps_with_adapters_or_without(size: int) -> None:
    graphs, captured = CudaGraphs(), BatchShape.uniform(4)
    graphs.capture(captured, _Graph, lambda: graphs.run("forward", captured, lambda: torch.zeros(1)))
    plain = BatchShape.uniform(size)
    assert graphs.padded(plain) == captured
    adapted = replace(plain, has_adapters=True)
    assert graphs.padded(adapted) == adapted and graphs.mode(adapted) == "eager"
    assert graphs.run("forward", adapted, lambda: torch.ones(1)).item() == 1
    with_adapters = replace(captured, has_adapters=True)
    graphs.capture(with_adapters, _Graph, lambda: graphs.run("forward", with_adapters, lambda: torch.full((1,), 2.0)))
    assert (graphs.padded(adapted), graphs.padded(plain)) == (with_adapters, captured)
    assert graphs.run("forward", with_adapters, lambda: torch.ones(1)).item() == 2
    assert graphs.run("forward", captured, lambda: torch.ones(1)).item() == 0


@pytest.mark.skipif(cpu_backend() != "cpp", reason="there is no C++ compiler: steps are not recorded")
def test_a_recorded_step_keeps_its_adapters() -> None:
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

    steps = RecordedSteps(8, 64, with_adapters=True)
    plain = BatchShape(3, 20, 1, 18)
    padded = steps.padded(replace(plain, has_adapters=True))
    assert padded == replace(steps.padded(plain), has_adapters=True)
    steps.run("forward", steps.padded(plain), lambda: torch.zeros(1))
    assert steps.run("forward", padded, lambda: torch.ones(1)).item() == 1
    assert steps.run("forward", steps.padded(plain), lambda: torch.full((1,), 2.0)).item() == 0
