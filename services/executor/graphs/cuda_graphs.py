"""CUDA graphs of steps: the device's work, recorded once per shape and launched as a unit.

A graph reads and writes the addresses it was recorded with, so everything it touches is in memory that stays: inputs
(`InputBuffers`), rows, KV cache, weights. A batch between two sizes runs as the next larger one; the padding has no
row (-1) and leaves no trace.

Steps with one token per request are recorded by their number of requests, all others by their number of tokens,
regardless of how these are divided among requests. For steps with drafts, one graph per number of drafts would need k
times as many graphs, and padding every request to the longest would multiply the tokens. For steps with prompts there
is no alternative. Kernels with work that depends on requests (attention) find it on the device: their grid is the
largest that this many tokens may need.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pagewire.kernels.ops import SHORT_QUERY
from pagewire.services.executor.batch.input_batch import BatchShape

Function = Callable[[], Tensor]


class Steps(Protocol):
    """Parts of steps that are recorded by the step's shape, or run eagerly."""

    def padded(self, shape: BatchShape) -> BatchShape:
        """Returns the shape to launch a step of this shape with: no smaller, and the same if it runs eagerly."""

    def missing(self) -> BatchShape | None:
        """Returns a padded shape that an empty step would record, so that no request has to wait for the recording."""

    def mode(self, shape: BatchShape) -> str:
        """Returns how a step of this padded shape runs, or has just run: captured, replayed or eager."""

    def run(self, name: str, shape: BatchShape, function: Function) -> Tensor:
        """Returns the function's result; if the part is recorded for this shape, the next run reuses its memory."""


class Graph(Protocol):
    @property
    def output(self) -> Tensor:
        """The result of the function; every replay overwrites it."""

    def replay(self) -> None: ...


Record = Callable[[Function], Graph]


class CudaGraph:
    """Recorded by running `function` once on `stream` without executing it; its memory comes from `pool`."""

    def __init__(self, function: Function, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.output = function()

    def replay(self) -> None:
        self._graph.replay()


def cuda_recorder() -> Record:
    """Records graphs that share one memory pool: they never run at the same time.

    They also have a separate stream: when the first graph is freed, torch frees the cuBLAS workspaces of all graphs
    that were recorded on its stream.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    return lambda function: CudaGraph(function, pool, stream)


class CudaGraphs:
    """Graphs by the name of a part of the step and by the step's shape. Without graphs, every step runs eagerly.

    For a captured shape without samples only the forward pass is captured, for steps with any samples: the rest
    runs eagerly.
    """

    def __init__(self) -> None:
        self._shapes: defaultdict[tuple[str, bool], list[BatchShape]] = defaultdict(list)  # by kind, adapters; rising
        self._graphs: dict[tuple[str, BatchShape], Graph] = {}
        self._record: Record | None = None
        self._capturing: BatchShape | None = None
        self._places: dict[str, Tensor] = {}  # by part: memory that the results of all its graphs share

    def padded(self, shape: BatchShape) -> BatchShape:
        """Returns the next larger captured shape of its kind; the same shape if there is none."""
        if self._capturing is not None:
            return _sampling(self._capturing, shape) if _kind(shape) == _kind(self._capturing) else shape
        for kind in _kinds(shape):
            shapes = self._shapes[kind, shape.has_adapters]
            index = bisect.bisect_left(shapes, shape.num_tokens, key=_num_tokens)
            if index < len(shapes) and shapes[index].max_query_len >= shape.max_query_len:
                return _sampling(shapes[index], shape)
        return shape

    def missing(self) -> BatchShape | None:
        """Returns None: all shapes are captured before the first request."""
        return None

    def mode(self, shape: BatchShape) -> str:
        """Returns how a step of this padded shape runs: captured, replayed or eager."""
        if self._capturing is not None:
            return "captured" if self._record is not None else "eager"
        return "replayed" if _key("forward", shape) in self._graphs else "eager"

    def capture(self, shape: BatchShape, record: Record, step: Callable[[], object]) -> None:
        """Captures the parts that `step`, which fits into this shape, runs through `run`. The step runs twice: the
        first run compiles the kernels. Capture the largest shape first."""
        for recorder in (None, record):
            self._capturing, self._record = shape, recorder
            try:
                step()
            finally:
                self._capturing, self._record = None, None
        assert _key("forward", shape) in self._graphs, f"the captured step does not have the shape {shape}"
        bisect.insort(self._shapes[_kind(shape), shape.has_adapters], shape, key=_num_tokens)

    def run(self, name: str, shape: BatchShape, function: Function) -> Tensor:
        """Returns the function's result; if there is a graph for this shape, the next run reuses its memory."""
        key = _key(name, shape)
        if (graph := self._graphs.get(key)) is None:
            if self._capturing is None or key != _key(name, self._capturing):
                return function()
            if name == "logits" or (name == "forward" and not self._capturing.num_sampled):
                function = self._into_one_place(name, function)
            if self._record is None:
                return function()
            graph = self._graphs[key] = self._record(function)
        graph.replay()
        return graph.output

    def _into_one_place(self, name: str, function: Function) -> Function:
        """Copies a result to memory that all graphs share: results of many tokens are large, each graph would keep its
        own, and nothing reads a result once there is another."""

        def step() -> Tensor:
            result, place = function(), self._places.get(name)
            if place is None or len(place) < len(result):
                place = self._places[name] = torch.empty_like(result)
            return place[: len(result)].copy_(result)

        return step


def _kind(shape: BatchShape) -> str:
    if shape.has_drafts_only:
        return "drafts"
    if shape.is_uniform:
        return "decodes"
    if shape.max_query_len <= SHORT_QUERY:
        return "chunks"  # of nearly computed prompts, or of tokens that a drafting model has skipped
    return "prompts" if shape.min_query_len > SHORT_QUERY else "mixed"


def _kinds(shape: BatchShape) -> Sequence[str]:
    """The kinds that a step can run as, the best first."""
    kind = _kind(shape)
    return (kind, "mixed") if kind in ("chunks", "prompts") else (kind,)


def _key(name: str, shape: BatchShape) -> tuple[str, BatchShape]:
    """Returns the key of a graph. The forward pass does not depend on the sampled positions."""
    return name, replace(shape, num_sampled=0) if name == "forward" else shape


def _sampling(captured: BatchShape, shape: BatchShape) -> BatchShape:
    """Returns the captured shape, with the samples of the step if sampling is not captured."""
    return captured if captured.num_sampled else replace(captured, num_sampled=shape.num_sampled)


def _num_tokens(shape: BatchShape) -> int:
    return shape.num_tokens
