"""What ranks know of how many drafts were right: with that, the host of each counts what rows have.

The scheduler's counts are those that a step is decided with, and a rank's must not be above them: there would be too
few blocks. So a rank knows of all results that the leader had when it told the step; and, in any case, of all but the
last, without which no step is decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pagewire.services.executor.step.step import StepOutput

MOST_PENDING = 1  # steps whose outcome is not waited for


def num_unknown(outputs: Sequence[StepOutput]) -> int:
    """How many steps have followed the last one with drafts whose result is there; of the leader's last ones."""
    for count, output in enumerate(reversed(outputs)):
        if output.drafted is not None and output.drafted.num_gained is not None:
            return count
    return len(outputs)


class Outcomes:
    """A follower's, by which its rows learn how many drafts were right."""

    def __init__(self) -> None:
        self._pending: deque[StepOutput] = deque()

    def wait(self, most: int = MOST_PENDING) -> None:
        """Until no more than so many steps, the last ones, are without."""
        while len(self._pending) > most:
            self._pending.popleft().wait()

    def add(self, output: StepOutput) -> None:
        self._pending.append(output)
        self.wait()

    def clear(self) -> None:
        self._pending.clear()
