"""Captures a runner's CUDA graphs, once it is warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pagewire.services.executor.capture_sizes import draft_sizes
from pagewire.services.executor.cuda_graphs import CudaGraphs, Function, Graph, cuda_recorder
from pagewire.services.executor.input_batch import BatchShape
from pagewire.services.executor.limits import Limits
from pagewire.services.executor.model_runner import ModelRunner


def graph_shapes(sizes: Sequence[int], limits: Limits, max_draft_tokens: int) -> list[BatchShape]:
    """Of the steps that are captured, falling in tokens: of these numbers of requests, and with drafts."""
    shapes = [BatchShape.uniform(size) for size in sizes]
    for num_tokens in draft_sizes(sizes, max_draft_tokens, limits.max_num_batched_tokens):
        # As many requests as there may be, and one that has the padding.
        num_reqs = min(num_tokens, limits.max_num_seqs) + 1
        shapes.append(BatchShape(num_reqs, num_tokens, num_tokens, 1 + max_draft_tokens))
    return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def filling(shape: BatchShape, max_draft_tokens: int) -> BatchShape:
    """A uniform step that fits into one of the `graph_shapes`, with as many tokens as possible."""
    if not shape.has_drafts_only:
        return shape
    query_len = min(1 + max_draft_tokens, shape.num_tokens)
    return BatchShape.uniform(min(shape.num_tokens // query_len, shape.num_reqs - 1), query_len)


def capture_graphs(
    runner: ModelRunner,
    sizes: Sequence[int],
    progress: Callable[[float, str], None],
    record: Callable[[Function], Graph] | None = None,
) -> None:
    """Captures steps of these numbers of requests, and steps with drafts."""
    capture_shapes(runner, graph_shapes(sizes, runner.limits, runner.max_draft_tokens), progress, record)


def capture_shapes(
    runner: ModelRunner,
    shapes: Sequence[BatchShape],
    progress: Callable[[float, str], None],
    record: Callable[[Function], Graph] | None = None,
) -> None:
    """shapes: some of `graph_shapes`, falling: the largest makes the memory that the others fit into."""
    record, graphs = record or cuda_recorder(), CudaGraphs()
    runner.use_graphs(graphs)
    for index, shape in enumerate(shapes):
        progress(index / len(shapes), f"CUDA graph of {shape.num_tokens} tokens")
        graphs.capture(shape, record, partial(runner.uniform_run, filling(shape, runner.max_draft_tokens)))
