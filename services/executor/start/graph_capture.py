"""Captures a runner's CUDA graphs, once it is warm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pagewire.kernels.ops import SHORT_QUERY
from pagewire.services.executor import stats
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.graphs.capture_sizes import graph_shapes
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Record, cuda_recorder
from pagewire.services.executor.runner.model_runner import ModelRunner


def fill(runner: ModelRunner, shape: BatchShape) -> None:
    """Executes a dummy run that fits into one of the `graph_shapes` and is of its kind."""
    if shape.is_uniform:
        runner.uniform_run(shape)
    elif shape.has_drafts_only:
        query_len = min(1 + runner.max_draft_tokens, shape.num_tokens)
        uniform = BatchShape.uniform(min(shape.num_tokens // query_len, shape.num_reqs - 1), query_len)
        runner.uniform_run(replace(uniform, has_adapters=shape.has_adapters))
    else:  # one long query, and a short one if the shape has short ones
        num_reqs = 1 if shape.min_query_len > SHORT_QUERY else 2
        num_tokens = min(shape.num_tokens, runner.limits.max_model_len)
        runner.dummy_run(num_reqs, num_tokens, has_adapters=shape.has_adapters)


def capture_graphs(
    runner: ModelRunner,
    sizes: Sequence[int],
    progress: Progress,
    record: Record | None = None,
    prompts: Sequence[int] = (),
) -> None:
    """Captures steps of these numbers of requests, steps with drafts, and steps of a drafting model. prompts: numbers
    of tokens of steps with prompts."""
    record = record or cuda_recorder()
    capture_shapes(runner, shapes_of(runner, sizes, prompts), progress, record)
    runner.proposer.capture(runner.proposer.graph_shapes(sizes, prompts), progress, record)
    stats.CUDA_GRAPHS.labels("captured").inc(num_graphs(runner, sizes, prompts))


def num_graphs(runner: ModelRunner, sizes: Sequence[int], prompts: Sequence[int] = ()) -> int:
    """Returns how many shapes `capture_graphs` captures."""
    return len(shapes_of(runner, sizes, prompts)) + len(runner.proposer.graph_shapes(sizes, prompts))


def shapes_of(runner: ModelRunner, sizes: Sequence[int], prompts: Sequence[int] = ()) -> list[BatchShape]:
    """Returns the shapes that `capture_graphs` captures of the runner's own steps."""
    with_adapters = runner.adapters.num_slots > 0
    return graph_shapes(sizes, runner.limits, runner.max_draft_tokens, prompts, with_adapters=with_adapters)


def capture_shapes(
    runner: ModelRunner,
    shapes: Sequence[BatchShape],
    progress: Progress,
    record: Record | None = None,
    graphs: CudaGraphs | None = None,
) -> None:
    """Captures steps of these shapes into `graphs`. shapes: some of `graph_shapes`, descending: the largest allocates
    the memory that the others fit into."""
    record, graphs = record or cuda_recorder(), graphs or CudaGraphs()
    runner.use_graphs(graphs)
    for index, shape in enumerate(shapes):
        progress(index / len(shapes), f"CUDA graph of {shape.num_tokens} tokens")
        graphs.capture(shape, record, partial(fill, runner, shape))
