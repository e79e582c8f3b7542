"""What steps cost by their tokens, measured at start: the scheduler weighs drafts against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from pagewire.services.executor.input_batch import BatchShape
from pagewire.services.executor.model_runner import ModelRunner
from pagewire.services.executor.parallel.group import Group

# Tokens of the steps. Larger ones cost so much more for each that straight lines will do.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# No further size is measured after so long: large models are slow, and then the first ones tell enough.
_ENOUGH_S = 0.7
_REPEATS = 2  # the faster counts; what a step runs for the first time is not counted


@dataclass(frozen=True)
class DecodeCosts:
    """steps: (tokens, seconds), rising in tokens. draft_seconds: of the proposer, for each token of a draft."""

    steps: tuple[tuple[int, float], ...] = ()
    draft_seconds: float = 0.0


NO_COSTS = DecodeCosts()


def measure(runner: ModelRunner, group: Group, clock: Callable[[], float] = time.perf_counter) -> DecodeCosts:
    """Of a runner that drafts and is warm. All ranks of the group call it, and stop at the same size."""
    limits = runner.limits
    largest = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    steps, start = list[tuple[int, float]](), clock()
    for size in _SIZES:
        if size > largest or (len(steps) > 1 and group.least(int(clock() - start < _ENOUGH_S)) == 0):
            break
        steps.append((size, _seconds(runner, BatchShape.uniform(size), clock)))
    with_drafts = BatchShape.uniform(1, 1 + runner.max_draft_tokens)
    if with_drafts.num_tokens > limits.max_num_batched_tokens:
        return DecodeCosts(tuple(steps))
    # What goes beyond a step of as many tokens is the proposer's.
    rest = _seconds(runner, with_drafts, clock) - _interpolated(steps, with_drafts.num_tokens)
    return DecodeCosts(tuple(steps), max(0.0, rest) / runner.max_draft_tokens)


def _seconds(runner: ModelRunner, shape: BatchShape, clock: Callable[[], float]) -> float:
    runner.uniform_run(shape)
    times = []
    for _ in range(_REPEATS):
        start = clock()
        runner.uniform_run(shape)
        times.append(clock() - start)
    return min(times)


def _interpolated(steps: list[tuple[int, float]], num_tokens: int) -> float:
    for (left, low), (right, high) in pairwise(steps):
        if num_tokens <= right:
            return low + (high - low) * (num_tokens - left) / (right - left)
    (left, low), (right, high) = steps[-2:] if len(steps) > 1 else steps * 2
    return high + (high - low) * (num_tokens - right) / max(1, right - left)
