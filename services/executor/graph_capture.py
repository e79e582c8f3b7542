"""Captures a runner's CUDA graphs, once it is warm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pagewire.services.executor.capture_sizes import graph_shapes
from pagewire.services.executor.cuda_graphs import CudaGraphs, Record, cuda_recorder
from pagewire.services.executor.input_batch import BatchShape
from pagewire.services.executor.loading.weights.jobs import Progress
from pagewire.services.executor.model_runner import ModelRunner


def filling(shape: BatchShape, max_draft_tokens: int) -> BatchShape:
    """A uniform step that fits into one of the `graph_shapes`, with as many tokens as possible."""
    if not shape.has_drafts_only:
        return shape
    query_len = min(1 + max_draft_tokens, shape.num_tokens)
    return BatchShape.uniform(min(shape.num_tokens // query_len, shape.num_reqs - 1), query_len)


def capture_graphs(
    runner: ModelRunner,
    sizes: Sequence[int],
    progress: Progress,
    record: Record | None = None,
) -> None:
    """Captures steps of these numbers of requests, steps with drafts, and those of a model that drafts."""
    record = record or cuda_recorder()
    capture_shapes(runner, graph_shapes(sizes, runner.limits, runner.max_draft_tokens), progress, record)
    runner.drafter.capture(runner.drafter.graph_shapes(sizes), progress, record)


def num_graphs(runner: ModelRunner, sizes: Sequence[int]) -> int:
    """Shapes that `capture_graphs` captures."""
    shapes = graph_shapes(sizes, runner.limits, runner.max_draft_tokens)
    return len(shapes) + len(runner.drafter.graph_shapes(sizes))


def capture_shapes(
    runner: ModelRunner,
    shapes: Sequence[BatchShape],
    progress: Progress,
    record: Record | None = None,
) -> None:
    """shapes: some of `graph_shapes`, falling: the largest makes the memory that the others fit into."""
    record, graphs = record or cuda_recorder(), CudaGraphs()
    runner.use_graphs(graphs)
    for index, shape in enumerate(shapes):
        progress(index / len(shapes), f"CUDA graph of {shape.num_tokens} tokens")
        graphs.capture(shape, record, partial(runner.uniform_run, filling(shape, runner.max_draft_tokens)))
