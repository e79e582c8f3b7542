"""Pacing: the next step is decided shortly before the device needs it.

Two steps are in flight so that the device never waits for the scheduler. If the second were decided as soon as
possible, it would wait in the executor's queue while the first runs, and a request that arrives meanwhile would be in
neither. Its decision is held back until the first is about to end, so it includes all requests that have arrived.

The cost model (`cost_model.py`) predicts how long a step takes. A prediction that is too short only costs some of that
gain. After one that is too long, the device waits until the result has arrived and the next step is decided and sent,
which takes long if a prompt of many thousand tokens has to be looked up and sent. So the lead, by which the decision
precedes the expected end, grows with every late step and shrinks with every other. Only the lead is learned here: the
time in which a decision reaches the device, which is not part of a step's cost.

In a pipeline, S steps run, and the first stage must not wait. Its progress is not reported, but a step with a result
left the first stage S - 1 steps ago.
"""

from collections import deque
from dataclasses import dataclass

_FIRST_LEAD = 0.005  # seconds
_MIN_LEAD = 0.003  # messages take this long when processes sometimes wait for a core
_MAX_LEAD = 0.1  # bounds the effect of a stall
# One in twelve steps is late if predictions err at random: ln(1.25) = 11 * -ln(0.98).
_GROWTH = 1.25
_DECAY = 0.98
# The predicted time is shortened by this share, but by at most this many seconds: too short is better than too long.
_CAUTION, _MOST_CAUTION = 0.03, 0.002
# A shorter hold gains little, and every hold risks a late step.
_MIN_HOLD = 0.01
_TIMER_RESOLUTION = 0.001  # uvloop's timers may fire this much too early
# A device may be idle for this long before a step that was in time: on CUDA, it copies staged data from the host.
_TOLERANCE = 0.0005


@dataclass(slots=True)
class _Sent:
    seconds: float  # the expected duration
    time: float
    was_held: bool
    followed_long: bool  # the previous step was long enough to hold this one back


class Pacer:
    """Predicts the end of the running step, and holds the next decision back until shortly before. Times are those of
    `time.monotonic`, in seconds."""

    def __init__(self, pipeline_depth: int) -> None:
        self._pipeline_depth = pipeline_depth
        self.num_late = 0  # steps that were held back too long: the device waited for them
        self.start_over()

    def start_over(self, num_stages: int = 1) -> None:
        """Starts over with an executor of unknown speed and `num_stages` stages; no step is in flight."""
        self._num_stages = num_stages
        self._in_flight: deque[_Sent] = deque()
        self._last_result_time = self._last_seconds = 0.0  # of the last completed step
        self._is_holding = self._was_held = False
        self.lead = _FIRST_LEAD

    def hold(self, now: float) -> float:
        """Begins, continues or stops holding the next decision back; called before every decision.

        Returns:
            The seconds to wait before the next call; 0: decide now.
        """
        left = self._seconds_left(now) - self.lead
        is_holding = left > (_TIMER_RESOLUTION if self._is_holding else _MIN_HOLD)
        self._was_held, self._is_holding = self._is_holding and not is_holding, is_holding
        return left if is_holding else 0.0

    def on_sent(self, seconds: float, now: float) -> None:
        """Takes in that a step was sent. seconds: its expected duration; 0: unknown."""
        followed_long = bool(self._in_flight) and self._in_flight[0].seconds > _MIN_LEAD + _MIN_HOLD
        seconds -= min(seconds * _CAUTION, _MOST_CAUTION)
        self._in_flight.append(_Sent(seconds, now, self._was_held, followed_long))

    def on_result(self, execute_seconds: float, idle_seconds: float | None, now: float) -> None:
        """Takes in that the oldest step in flight is done. execute_seconds: those of the slowest stage. idle_seconds:
        those for which the first stage waited for the step; None if unknown."""
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
        """Returns the seconds from the previous result to that of the oldest step in flight. If the step did not follow
        at once, it is the time in each stage since the step was sent."""
        if not self._in_flight:
            return 0.0
        return min(now - self._last_result_time, (now - self._in_flight[0].time) / self._num_stages)

    def _seconds_left(self, now: float) -> float:
        """Returns the seconds until the first stage has finished all its steps; 0 if it has none, or if no step may be
        sent before one in flight is done."""
        if not 0 < len(self._in_flight) < self.max_in_flight:
            return 0.0
        end = self._last_result_time - (self._num_stages - 1) * self._last_seconds
        for step in self._in_flight:
            end = max(end, step.time) + step.seconds
        return end - now
