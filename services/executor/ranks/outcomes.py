"""Outcomes of steps with drafts, by which the host of each rank counts the tokens of rows.

The scheduler decides a step by its own counts; a rank's counts must not be above them, or there would be too few
blocks. So a rank waits for all results that the leader had when it sent the step, and always for all but the last one,
as no step is decided without these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pagewire.services.executor.step.step import StepOutput

MOST_PENDING = 1  # steps without a known outcome


def num_unknown(outputs: Sequence[StepOutput]) -> int:
    """Returns the number of the leader's steps after the last step with drafts that has a result."""
    for count, output in enumerate(reversed(outputs)):
        if output.drafted is not None and output.drafted.num_gained is not None:
            return count
    return len(outputs)


class Outcomes:
    """The pending outcomes of a follower; waiting for one updates the counts of its rows."""

    def __init__(self) -> None:
        self._pending: deque[StepOutput] = deque()

    def wait(self, most: int = MOST_PENDING) -> None:
        """Waits until at most this many steps, the last ones, have no outcome."""
        while len(self._pending) > most:
            self._pending.popleft().wait()

    def add(self, output: StepOutput) -> None:
        self._pending.append(output)
        self.wait()

    def clear(self) -> None:
        self._pending.clear()
