"""Pacing: the next step is decided shortly before the device needs it.

Two steps are in flight so that the device never waits for the scheduler. Decided as soon as there is room for it, the
second would lie in the executor's queue for as long as the first runs, and a request that arrives meanwhile would be in
neither. Held back until the first is about to end, it takes along whatever has arrived.

How long the device takes for a step is guessed from the last one of its size, which is that with as many drafts as are
likely to be found, and afterwards that with as many as there were. A guess that is too short costs nothing but some of
that gain. After one that is too long the device waits, at most until the result has arrived and the next step is
decided and sent: that takes long if a prompt of many thousand tokens has to be looked up and sent. So the lead, by
which the decision precedes the guessed end, grows with every step that came too late and shrinks with every other.

The cost model (`cost_model.py`) is not asked: it learns the time between results, waiting included, averages over some
twenty steps, and knows no jumps between sizes. Guesses by it were better for steps of steady speed, but followed a
change of speed or a jump later.

Where the executor is a pipeline, S steps run, and it is the first stage that must not wait. The step that it executes
is not reported, but a step with a result has left it S - 1 steps ago."""

from collections import deque
from dataclasses import dataclass

_FIRST_LEAD = 0.005  # seconds
_MIN_LEAD = 0.003  # what messages take between processes that wait for a core now and then
_MAX_LEAD = 0.1  # what one stall leaves behind is soon gone
# One in twelve steps is late where guesses err at random: ln(1.25) = 11 * -ln(0.98).
_GROWTH = 1.25
_DECAY = 0.98
# A shorter hold gains little, and every hold risks a late step.
_MIN_HOLD = 0.01
_TIMER_RESOLUTION = 0.001  # uvloop's timers: so much too early
# So long a device may do nothing before a step that was there in time: on CUDA, copying what the host has staged.
_TOLERANCE = 0.0005


@dataclass(slots=True)
class _Sent:
    num_tokens: int  # without drafts
    num_drafts: float  # that are expected
    time: float
    was_held: bool
    followed_long: bool  # the step before was long enough that this one might have been held


class Pacer:
    """Guesses when the step that runs will end. Times are those of `time.monotonic`, in seconds."""

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
        self._last_of_size: dict[int, tuple[int, float]] = {}  # binary magnitude of tokens -> tokens, seconds
        self.lead = _FIRST_LEAD

    def hold(self, now: float) -> float:
        """Holds the next decision back, goes on with that or ends it; to be called before every decision.

        Returns:
            How many seconds to wait before asking again; 0: decide now.
        """
        left = self._seconds_left(now) - self.lead
        is_holding = left > (_TIMER_RESOLUTION if self._is_holding else _MIN_HOLD)
        self._was_held, self._is_holding = self._is_holding and not is_holding, is_holding
        return left if is_holding else 0.0

    def on_sent(self, num_tokens: int, now: float, num_drafts: float = 0.0) -> None:
        """Records that a decided step is on its way. num_tokens: without drafts. num_drafts: the likely number."""
        followed_long = bool(self._in_flight) and self._guess(self._in_flight[0]) > _MIN_LEAD + _MIN_HOLD
        self._in_flight.append(_Sent(num_tokens, num_drafts, now, self._was_held, followed_long))

    def on_result(self, execute_seconds: float, idle_seconds: float | None, now: float, num_drafts: int = 0) -> None:
        """The oldest step in flight is done. execute_seconds: of the slowest stage. idle_seconds: how long the first
        stage had waited for it; None if unknown. num_drafts: that there were."""
        done = self._in_flight.popleft()
        self._last_result_time, self._last_seconds = now, execute_seconds
        if num_tokens := done.num_tokens + num_drafts:  # else it only freed rows
            self._last_of_size[num_tokens.bit_length()] = (num_tokens, execute_seconds)
        if idle_seconds is None:
            return
        if done.was_held and idle_seconds > _TOLERANCE:
            self.num_late += 1
            self.lead = min(self.lead * _GROWTH, _MAX_LEAD)
        elif done.was_held or done.followed_long:
            self.lead = max(self.lead * _DECAY, _MIN_LEAD)

    @property
    def max_in_flight(self) -> int:
        """Steps: one in each stage, and perhaps one that waits for the first."""
        return self._num_stages - 1 + self._pipeline_depth

    def seconds_of_oldest(self, now: float) -> float:
        """Returns the seconds between the result of the step before and that of the oldest step in flight. If it did
        not follow it at once: the time in each stage since it was sent."""
        if not self._in_flight:
            return 0.0
        return min(now - self._last_result_time, (now - self._in_flight[0].time) / self._num_stages)

    def _seconds_left(self, now: float) -> float:
        """Until the first stage is done with all it has; 0 if it has nothing, or if no other step may be sent before
        one in flight is done."""
        if not 0 < len(self._in_flight) < self.max_in_flight:
            return 0.0
        end = self._last_result_time - (self._num_stages - 1) * self._last_seconds
        for step in self._in_flight:
            end = max(end, step.time) + self._guess(step)
        return end - now

    def _guess(self, step: _Sent) -> float:
        """Seconds that it takes; rather too few than too many."""
        num_tokens = step.num_tokens + int(step.num_drafts)
        last_num_tokens, seconds = self._last_of_size.get(num_tokens.bit_length(), (1, 0.0))
        return seconds * min(1.0, num_tokens / last_num_tokens)
