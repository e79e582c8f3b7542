"""Measures the cost of steps by their tokens at start: the scheduler weighs drafts against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.runner.executor_info import DecodeCosts
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.warm_up import with_drafts

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
    drafted = with_drafts(runner)
    num_drafts = drafted.num_tokens - 1
    times: dict[BatchShape, float] = {}
    if num_drafts:
        times[drafted] = _seconds(runner, drafted, clock)
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
    steps = [(shape.num_tokens, seconds) for shape, seconds in times.items() if shape.max_query_len == 1]
    if not num_drafts:
        return DecodeCosts(tuple(steps))
    # The time beyond a step of the same number of tokens is the proposer's.
    rest = times[drafted] - _interpolated(steps, drafted.num_tokens)
    return DecodeCosts(tuple(steps), max(0.0, rest) / num_drafts)


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
