"""Records steps on a CPU while the device thread has nothing else to do (`RecordedSteps.missing`)."""

from __future__ import annotations

import logging
import time

from pagewire.services.executor.runner.runner import Runner

logger = logging.getLogger(__name__)

# Whoever asks again so soon after the last answer does not wait for a recording.
QUIET_S = 0.1
# A newcomer waits for the recording that is under way. Steps that take longer are recorded when they first occur: then
# it matters little.
LONGEST_S = 0.2


class IdleRecording:
    """One shape after the other, the smallest first. All calls come from the device thread."""

    def __init__(self, runner: Runner, longest: float = LONGEST_S) -> None:
        """longest: seconds; when two in turn have taken longer, they are the last: one may have been unlucky."""
        self._runner = runner
        self._longest = longest
        self._num_recorded, self._num_long, self._seconds = 0, 0, 0.0
        self.is_done = False

    def record_next(self) -> None:
        # Of this thread: on busy cores nobody learns from the time on the wall.
        started = time.thread_time()
        try:
            self.is_done = not self._runner.record_missing()
        except Exception:
            logger.exception("a step could not be recorded while nobody waited; others will be when they occur")
            self.is_done = True
        seconds = time.thread_time() - started
        self._seconds += seconds
        if not self.is_done:
            self._num_recorded += 1
            self._num_long = self._num_long + 1 if seconds > self._longest else 0
            self.is_done = self._num_long == 2
        if self.is_done and self._num_recorded:
            logger.info("recorded %d shapes of steps in %.1f s while nobody waited", self._num_recorded, self._seconds)
