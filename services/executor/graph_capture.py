"""Captures a runner's CUDA graphs, once it is warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pagewire.services.executor.cuda_graphs import CudaGraphs, Function, Graph, cuda_recorder
from pagewire.services.executor.input_batch import BatchShape
from pagewire.services.executor.model_runner import ModelRunner


def capture_graphs(
    runner: ModelRunner,
    sizes: Sequence[int],
    progress: Callable[[float, str], None],
    record: Callable[[Function], Graph] | None = None,
) -> None:
    """Captures steps of these numbers of requests, without and with as many drafts as there may be.

    The largest first: the others fit into its memory.
    """
    record, graphs = record or cuda_recorder(), CudaGraphs()
    runner.use_graphs(graphs)
    lens, max_tokens = {1, 1 + runner.max_draft_tokens}, runner.limits.max_num_batched_tokens
    shapes = [BatchShape.uniform(size, query_len) for size in sizes for query_len in lens]
    falling = sorted((s for s in shapes if s.num_tokens <= max_tokens), key=lambda s: s.num_tokens, reverse=True)
    # Before there is a larger graph that it would be padded to: compiles what is recorded.
    for shape in falling:
        runner.uniform_run(shape)
    for index, shape in enumerate(falling):
        progress(index / len(falling), f"CUDA graph of {shape.num_reqs} requests")
        graphs.capture(shape, record, partial(runner.uniform_run, shape))
