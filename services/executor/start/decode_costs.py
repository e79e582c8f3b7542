"""Measures the cost of steps by their tokens at start: the scheduler weighs drafts against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.runner.executor_info import DecodeCosts
from pagewire.services.executor.runner.model_runner import ModelRunner

# Tokens of the measured steps. The cost of larger steps grows linearly.
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_WARM_SIZES = 2  # the first ones, of which `warm_up` has run steps
# After the first time, no further size is measured; after the second, no size is measured again: a start takes hardly
# longer, and the first times of a large, slow model are accurate enough. For other models the fastest of several times
# counts, as something else may run on the machine.
_ENOUGH_S, _ENOUGH_AGAIN_S = 0.1, 0.15
_MOST_TIMES = 5


def measure(runner: ModelRunner, group: Group, clock: Callable[[], float] = time.perf_counter) -> DecodeCosts:
    """Measures a runner that drafts and is warm. All ranks of the group call it, and stop at the same step."""
    limits, start = runner.limits, clock()
    largest = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    with_drafts = BatchShape.uniform(1, 1 + runner.max_draft_tokens)
    times: dict[BatchShape, float] = {}
    if with_drafts.num_tokens <= limits.max_num_batched_tokens:
        times[with_drafts] = _seconds(runner, with_drafts, clock)
    for size in (size for size in _SIZES if size <= largest):
        shape = BatchShape.uniform(size)
        if size > _WARM_SIZES:
            runner.uniform_run(shape)  # the first step of a shape may be recorded
        times[shape] = _seconds(runner, shape, clock)
        if size > 1 and not group.least(int(clock() - start < _ENOUGH_S)):
            break
    for _ in range(_MOST_TIMES - 1):
        if not group.least(int(clock() - start < _ENOUGH_AGAIN_S)):
            break
        times = {shape: min(seconds, _seconds(runner, shape, clock)) for shape, seconds in times.items()}
    steps = [(shape.num_tokens, seconds) for shape, seconds in times.items() if shape != with_drafts]
    if with_drafts not in times:
        return DecodeCosts(tuple(steps))
    # The time beyond a step of the same number of tokens is the proposer's.
    rest = times[with_drafts] - _interpolated(steps, with_drafts.num_tokens)
    return DecodeCosts(tuple(steps), max(0.0, rest) / runner.max_draft_tokens)


def _seconds(runner: ModelRunner, shape: BatchShape, clock: Callable[[], float]) -> float:
    start = clock()
    runner.uniform_run(shape)
    return clock() - start


def _interpolated(steps: list[tuple[int, float]], num_tokens: int) -> float:
    for (left, low), (right, high) in pairwise(steps):
        if num_tokens <= right:
            return low + (high - low) * (num_tokens - left) / (right - left)
    (left, low), (right, high) = steps[-2:] if len(steps) > 1 else steps * 2
    return high + (high - low) * (num_tokens - right) / max(1, right - left)
