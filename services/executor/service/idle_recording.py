"""Records steps on a CPU while no request waits (`RecordedSteps.missing`)."""

from __future__ import annotations

import logging
import time

from pagewire.services.executor.runner.runner import Runner

logger = logging.getLogger(__name__)

# Seconds without a request before a recording begins: a client that sends its next request sooner need not wait.
QUIET_S = 0.1
# A new request waits for a running recording. Longer steps are recorded when they first occur: for them the delay
# matters little.
LONGEST_S = 0.2


class IdleRecording:
    """Records one shape after the other, the smallest first. All calls come from the device thread."""

    def __init__(self, runner: Runner, longest: float = LONGEST_S) -> None:
        """longest: seconds. Recording ends when two in succession take longer; one alone may be chance."""
        self._runner = runner
        self._longest = longest
        self._num_recorded, self._num_long, self._seconds = 0, 0, 0.0
        self.is_done = False

    def record_next(self) -> None:
        # CPU time of this thread: wall time is unreliable on busy cores.
        started = time.thread_time()
        try:
            self.is_done = not self._runner.record_missing()
        except Exception:
            logger.exception("a step could not be recorded while idle; the remaining ones are recorded when they occur")
            self.is_done = True
        seconds = time.thread_time() - started
        self._seconds += seconds
        if not self.is_done:
            self._num_recorded += 1
            self._num_long = self._num_long + 1 if seconds > self._longest else 0
            self.is_done = self._num_long == 2
        if self.is_done and self._num_recorded:
            logger.info("recorded %d shapes of steps in %.1f s while idle", self._num_recorded, self._seconds)
