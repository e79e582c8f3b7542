"""The time that a step may take, learned from earlier steps: it distinguishes a hanging device from a slow one."""

from __future__ import annotations

import threading
from collections import deque

from pagewire.process.watchdog import Pulse

# Margin on the learned time: other processes may take the cores for a while, and sampling is costlier in some steps.
_MARGIN = 3.0
# For the first step of its size, which may compile kernels.
_FIRST_S = 60.0
# For the images of a step: a CPU may take half a minute for a large one.
IMAGES_S = 120.0
# For work that copies all of the model's weights.
INSTALL_S = 120.0
# For recording an empty step.
RECORDING_S = 60.0
_DECAY = 0.98  # of the slowest time of a size, with each later step


class StepTimes:
    """Learns by size, the binary magnitude of a step's load (`InputBatch.load`)."""

    def __init__(self) -> None:
        self._slowest: dict[int, tuple[float, float]] = {}  # magnitude -> load, seconds

    def expect(self, load: float) -> float | None:
        """Returns the seconds that such a step may take; None: nothing is known yet.

        A smaller step takes no longer than a larger one, and time grows at most in proportion to size: so each known
        size bounds all others, and the tightest bound counts.
        """
        if not self._slowest:
            return None
        seconds = min(s * max(1.0, load / of_load) for of_load, s in self._slowest.values())
        return _MARGIN * seconds + (0.0 if _magnitude(load) in self._slowest else _FIRST_S)

    def observe(self, load: float, seconds: float) -> None:
        """Records a finished step."""
        of_load, slowest = self._slowest.get(_magnitude(load), (load, 0.0))
        self._slowest[_magnitude(load)] = (load, max(seconds, _DECAY * slowest * load / of_load))


def _magnitude(load: float) -> int:
    return int(load).bit_length()


class StepWatch:
    """Sets the time in which a watchdog expects the next sign of life of the device. Called on any thread.

    On CUDA a step is launched while the previous one runs; steps finish in the order of their launches.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._times = StepTimes()
        self._lock = threading.Lock()
        self._preparing: float | None = None  # allowed seconds beyond the pulse's own bound; None = idle
        self._launching: tuple[float, float | None] | None = None  # load, expected seconds
        self._launched: deque[tuple[float, float | None]] = deque()

    def begin(self, allowance: float | None = 0.0) -> None:
        """Marks that the device thread has work. allowance: seconds for work before a step is launched: images of any
        size, or other weights; None: without a limit."""
        with self._lock:
            self._preparing = allowance
            self._beat()

    def launching(self, load: float) -> None:
        """Marks the begin of a step with this load."""
        with self._lock:
            self._preparing = 0.0
            self._launching = (load, self._times.expect(load))
            self._beat()

    def launched(self) -> None:
        """Marks that the device has the step; `done` follows. Nothing is computed if it had no load."""
        with self._lock:
            self._launched.append(self._launching or (0.0, 0.0))
            self._launching = None
            self._beat()

    def end(self) -> None:
        """Marks that the device thread has no work."""
        with self._lock:
            self._preparing, self._launching = None, None
            self._beat()

    def done(self, seconds: float) -> None:
        """Marks that the first of the launched steps is done."""
        with self._lock:
            load, _ = self._launched.popleft()
            if load:
                self._times.observe(load, seconds)
            self._beat()

    def _beat(self) -> None:
        expected = [seconds for _, seconds in self._launched]
        expected += [self._launching[1]] if self._launching else []
        expected += [self._preparing] if self._preparing is not None else []
        if None in expected or not expected:
            self._pulse.beat(None)
        else:
            self._pulse.beat(sum(seconds for seconds in expected if seconds is not None))
