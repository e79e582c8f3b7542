"""Measures the cost of steps by their tokens at start: the scheduler weighs drafts against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.runner.executor_info import DecodeCosts, DraftMethod
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.warm_up import with_drafts

# Tokens of the measured steps. The cost of larger steps grows linearly.
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_WARM_SIZES = 2  # the first ones, of which `warm_up` has run steps
# The requests of a round that is measured, too, if one for a single request takes more than this share of a step, and a
# step at most these seconds.
_SEVERAL, _COSTLY, _FAST_S = 8, 0.05, 0.02
# After the first time, no further size is measured; after the second, no size is measured again: a start takes hardly
# longer, and the first times of a large, slow model are accurate enough. For other models the fastest of several times
# counts, as something else may run on the machine.
_ENOUGH_S, _ENOUGH_AGAIN_S = 0.1, 0.15
_MOST_TIMES = 5


class _Times:
    """The shortest times of steps, by the method of their drafts and their shape."""

    def __init__(self, runner: ModelRunner, clock: Callable[[], float]) -> None:
        self._runner, self._clock = runner, clock
        self.seconds: dict[tuple[int, BatchShape], float] = {}

    def take(self, method: int, shape: BatchShape) -> None:
        self._runner.proposer.prefer(method)
        start = self._clock()
        self._runner.uniform_run(shape)
        taken = self._clock() - start
        self.seconds[method, shape] = min(taken, self.seconds.get((method, shape), taken))

    def take_again(self) -> None:
        for method, shape in list(self.seconds):
            self.take(method, shape)

    @property
    def steps(self) -> list[tuple[int, float]]:
        return [(shape.num_tokens, taken) for (_, shape), taken in self.seconds.items() if shape.max_query_len == 1]

    def round(self, method: int, shape: BatchShape) -> tuple[int, float]:
        """Returns the requests of a round, and its time: that beyond a step of as many tokens is the proposer's."""
        rest = self.seconds[method, shape] - _interpolated(self.steps, shape.num_tokens)
        return shape.num_reqs, max(0.0, rest) / (shape.max_query_len - 1)


def measure(
    runner: ModelRunner,
    group: Group,
    clock: Callable[[], float] = time.perf_counter,
    limit_clock: Callable[[], float] = time.perf_counter,
) -> DecodeCosts:
    """Measures a runner that drafts and is warm. All ranks of the group call it, and stop at the same step. clock: of
    the costs. limit_clock: of the time that a start may take for them."""
    limits, start, proposer = runner.limits, limit_clock(), runner.proposer
    largest = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    times, drafted = _Times(runner, clock), with_drafts(runner)
    methods = range(len(proposer.methods))
    is_ready = [proposer.prefer(method) for method in methods]
    measured = [method for method in methods if is_ready[method] and drafted.max_query_len > 1]
    for method in measured:
        times.take(method, drafted)
    for size in (size for size in _SIZES if size <= largest):
        shape = BatchShape.uniform(size)
        if size > _WARM_SIZES:
            runner.uniform_run(shape)  # the first step of a shape may be recorded
        times.take(0, shape)
        if size > 1 and not group.least(int(limit_clock() - start < _ENOUGH_S)):
            break
    for _ in range(_MOST_TIMES - 1):
        if not group.least(int(limit_clock() - start < _ENOUGH_AGAIN_S)):
            break
        times.take_again()
    rounds = {method: [times.round(method, drafted)] for method in measured}
    several = with_drafts(runner, _SEVERAL)
    fits = limits.max_num_seqs >= _SEVERAL and several.num_tokens <= limits.max_num_batched_tokens
    step = times.steps[0][1]
    for method in measured:
        is_worth_it = fits and step < _FAST_S and rounds[method][0][1] > _COSTLY * step
        if group.least(int(is_worth_it)):  # each rank has measured other times
            for _ in range(2):  # the first is recorded
                times.take(method, several)
            rounds[method].append(times.round(method, several))
    proposer.prefer(0)
    named = zip(proposer.methods, methods, strict=True)
    return DecodeCosts(
        tuple(times.steps),
        tuple(DraftMethod(name, tuple(rounds.get(index, ())), not is_ready[index]) for name, index in named),
    )


def _interpolated(steps: list[tuple[int, float]], num_tokens: int) -> float:
    for (left, low), (right, high) in pairwise(steps):
        if num_tokens <= right:
            return low + (high - low) * (num_tokens - left) / (right - left)
    (left, low), (right, high) = steps[-2:] if len(steps) > 1 else steps * 2
    return high + (high - low) * (num_tokens - right) / max(1, right - left)
