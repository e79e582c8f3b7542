"""Pacing: the next step is decided shortly before the device needs it.

Two steps are in flight so that the device never waits for the scheduler. If the second were decided as soon as there
is room for it, it would wait in the executor's queue while the first runs, and a request that arrives meanwhile would
be in neither. Held back until the first is about to end, it takes along whatever has arrived.

The cost model (`cost_model.py`) foresees how long a step takes. A guess that is too short costs nothing but some of
that gain. After one that is too long the device waits, at most until the result has arrived and the next step is
decided and sent: that takes long if a prompt of many thousand tokens has to be looked up and sent. So the lead, by
which the decision precedes the foreseen end, grows with every step that came too late and shrinks with every other. It
is the only quantity that is learned here: the time that a decision takes to reach the device, which is no cost of a
step.

Where the executor is a pipeline, S steps run, and it is the first stage that must not wait. Its progress is not
reported, but a step whose result has arrived left it S - 1 steps ago.
"""

from collections import deque
from dataclasses import dataclass

_FIRST_LEAD = 0.005  # seconds
_MIN_LEAD = 0.003  # what messages take between processes that wait for a core now and then
_MAX_LEAD = 0.1  # a stall has no longer effect
# One in twelve steps is late where guesses err at random: ln(1.25) = 11 * -ln(0.98).
_GROWTH = 1.25
_DECAY = 0.98
# The foreseen time is shortened by this share, but by no more seconds: rather too short than too long.
_CAUTION, _MOST_CAUTION = 0.03, 0.002
# A shorter hold gains little, and every hold risks a late step.
_MIN_HOLD = 0.01
_TIMER_RESOLUTION = 0.001  # uvloop's timers fire so much too early
# A device may be idle for so long before a step that was there in time: on CUDA, it copies what the host has staged.
_TOLERANCE = 0.0005


@dataclass(slots=True)
class _Sent:
    seconds: float  # that it should take
    time: float
    was_held: bool
    followed_long: bool  # the step before was long enough that this one might have been held


class Pacer:
    """Foresees the end of the step that runs, and holds the next decision back until shortly before. Times are those of
    `time.monotonic`, in seconds."""

    def __init__(self, pipeline_depth: int) -> None:
        self._pipeline_depth = pipeline_depth
        self.num_late = 0  # steps that were held back too long: the device waited for them
        self.start_over()

    def start_over(self, num_stages: int = 1) -> None:
        """Starts over with an executor of unknown speed, with `num_stages`; nothing is in flight."""
        self._num_stages = num_stages
        self._in_flight: deque[_Sent] = deque()
        self._last_result_time = self._last_seconds = 0.0  # of the last step that was done
        self._is_holding = self._was_held = False
        self.lead = _FIRST_LEAD

    def hold(self, now: float) -> float:
        """Begins, continues or ends to hold the next decision back; called before every decision.

        Returns:
            The seconds to wait before the next call; 0: decide now.
        """
        left = self._seconds_left(now) - self.lead
        is_holding = left > (_TIMER_RESOLUTION if self._is_holding else _MIN_HOLD)
        self._was_held, self._is_holding = self._is_holding and not is_holding, is_holding
        return left if is_holding else 0.0

    def on_sent(self, seconds: float, now: float) -> None:
        """Takes in that a step was sent. seconds: that it should take; 0: unknown."""
        followed_long = bool(self._in_flight) and self._in_flight[0].seconds > _MIN_LEAD + _MIN_HOLD
        seconds -= min(seconds * _CAUTION, _MOST_CAUTION)
        self._in_flight.append(_Sent(seconds, now, self._was_held, followed_long))

    def on_result(self, execute_seconds: float, idle_seconds: float | None, now: float) -> None:
        """Takes in that the oldest step in flight is done. execute_seconds: of the slowest stage. idle_seconds: how
        long the first stage had waited for it; None if unknown."""
        done = self._in_flight.popleft()
        self._last_result_time, self._last_seconds = now, execute_seconds
        if idle_seconds is None:
            return
        if done.was_held and idle_seconds > _TOLERANCE:
            self.num_late += 1
            self.lead = min(self.lead * _GROWTH, _MAX_LEAD)
        elif done.was_held or done.followed_long:
            self.lead = max(self.lead * _DECAY, _MIN_LEAD)

    @property
    def max_in_flight(self) -> int:
        """The most steps in flight: one in each stage, and perhaps one that waits for the first."""
        return self._num_stages - 1 + self._pipeline_depth

    def seconds_of_oldest(self, now: float) -> float:
        """Returns the seconds between the result of the step before and that of the oldest step in flight. If it did
        not follow it at once: the time in each stage since it was sent."""
        if not self._in_flight:
            return 0.0
        return min(now - self._last_result_time, (now - self._in_flight[0].time) / self._num_stages)

    def _seconds_left(self, now: float) -> float:
        """Returns the seconds until the first stage is done with all steps it has; 0 if it has none, or if no other
        step may be sent before one in flight is done."""
        if not 0 < len(self._in_flight) < self.max_in_flight:
            return 0.0
        end = self._last_result_time - (self._num_stages - 1) * self._last_seconds
        for step in self._in_flight:
            end = max(end, step.time) + step.seconds
        return end - now
