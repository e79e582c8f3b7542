"""Timing of short calls: contestants in turn, over buffers that no cache holds, from replays of CUDA graphs.

A graph holds enough calls to last MIN_GRAPH_SECONDS, so that neither the launch nor the clock shows; its calls go
round the buffer sets. On a CPU the host clock times every call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]

NUM_REPLAYS = 51
MIN_GRAPH_SECONDS = 400e-6
MAX_GRAPH_CALLS = 512
# All buffer sets of a case together are larger than the caches: 60 MB are the most that a Hopper GPU has.
COLD_BYTES = 256 << 20
MAX_SETS = 64

_CPU_ROUNDS = 3
_WARM_UP_REPLAYS = 3


@dataclass(frozen=True)
class Ceilings:
    """The best rates of the device, measured in this run; bytes and floating-point operations per second."""

    copy: float  # bytes read plus bytes written
    read: float
    matmul: float  # bf16, random data
    fp8: float = 0.0  # as matmul, with one byte per number; 0 where it was not measured
    int8: float = 0.0

    def floor_seconds(self, num_bytes: float, num_flops: float = 0.0, rate: str = "matmul") -> float:
        """No kernel that moves this and computes this is much faster. rate: the field to divide num_flops by."""
        return max(num_bytes / self.copy, num_flops / (getattr(self, rate) or self.matmul))


def num_sets(bytes_per_set: int, device: torch.device) -> int:
    """Returns how many copies of a case's buffers are needed for cold caches, at least three."""
    if device.type == "cpu":
        return 2
    return min(MAX_SETS, max(3, math.ceil(COLD_BYTES / bytes_per_set)))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns |actual - expected| / |expected|; NaN, which passes no comparison, where anything is NaN."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def median_seconds(
    contestants: Mapping[str, Sequence[Call]], device: torch.device, reset: Call | None = None
) -> dict[str, float]:
    """Seconds per call of each contestant, which has one call per buffer set; contestants take turns.

    `reset` undoes, outside the measured time, what calls change.
    """
    if device.type == "cpu":
        return _on_host_clock(contestants, reset)
    return _by_replays(contestants, reset)


def check_capture(call: Call, device: torch.device) -> None:
    """Raises if a call cannot be part of a CUDA graph."""
    if device.type == "cuda":
        _capture([call])


def _on_host_clock(contestants: Mapping[str, Sequence[Call]], reset: Call | None) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(_CPU_ROUNDS):
        for name, calls in contestants.items():
            for call in calls:
                if reset is not None:
                    reset()
                started = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


@dataclass
class _Replays:
    """One contestant's graphs, used in turn."""

    graphs: list[torch.cuda.CUDAGraph]
    calls_per_graph: int
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]]
    # Lives as long as the others: with the first graph that ends, torch frees the cuBLAS workspace of all graphs that
    # were captured on the same stream.
    trial: _Replays | None = None

    def run(self, index: int, reset: Call | None) -> None:
        if reset is not None:
            reset()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graphs[index % len(self.graphs)].replay()
        end.record()
        self.events.append((start, end))

    def median_seconds(self) -> float:
        measured = self.events[_WARM_UP_REPLAYS:]
        return statistics.median(start.elapsed_time(end) for start, end in measured) * 1e-3 / self.calls_per_graph


def _by_replays(contestants: Mapping[str, Sequence[Call]], reset: Call | None) -> dict[str, float]:
    replays = {name: _capture_all(calls, reset) for name, calls in contestants.items()}
    # Work ahead of the first replay: none is then timed while the host still launches it.
    torch.cuda._sleep(10_000_000)
    for index in range(NUM_REPLAYS + _WARM_UP_REPLAYS):
        for contestant in replays.values():
            contestant.run(index, reset)
    torch.cuda.synchronize()
    return {name: contestant.median_seconds() for name, contestant in replays.items()}


def _capture_all(calls: Sequence[Call], reset: Call | None) -> _Replays:
    if reset is not None:
        reset()
    for call in calls[:2]:
        call()  # compiles, and allocates what is allocated once
    trial = _Replays([_capture(calls)], len(calls), [])
    for index in range(_WARM_UP_REPLAYS + 1):
        trial.run(index, reset)
    torch.cuda.synchronize()
    calls_per_graph = min(MAX_GRAPH_CALLS, math.ceil(MIN_GRAPH_SECONDS / trial.median_seconds()))
    # [c0 c1] [c2 c0] [c1 c2] for three sets and two calls a graph
    num_graphs = math.ceil(len(calls) / calls_per_graph)
    if num_graphs == 1:
        calls_per_graph = len(calls) * math.ceil(calls_per_graph / len(calls))
    order = [calls[index % len(calls)] for index in range(num_graphs * calls_per_graph)]
    graphs = [_capture(order[first : first + calls_per_graph]) for first in range(0, len(order), calls_per_graph)]
    return _Replays(graphs, calls_per_graph, [], trial)


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # The outer context goes back to the caller's stream where capturing fails: torch's own then stays on its stream.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def measure_ceilings(device: torch.device, small: bool = False) -> Ceilings:
    """A large copy, a large sum and an 8192³ product, on random data."""
    num_bytes, side = (64 << 20, 512) if small else (4 << 30, 8192)
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    a, b = torch.randn(2, side, side, device=device).bfloat16()
    times = median_seconds(
        {
            "copy": [lambda: target.copy_(source)],
            "read": [lambda: source.sum()],
            "matmul": [lambda: a @ b],
        },
        device,
    )
    return Ceilings(2 * num_bytes / times["copy"], num_bytes / times["read"], 2 * side**3 / times["matmul"])
