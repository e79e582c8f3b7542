"""When to decide the next step: shortly before the device needs it.

Two steps are in flight so that the device never waits for the scheduler. Decided as soon as there is room for it, the
second would lie in the executor's queue for as long as the first runs, and a request that arrives meanwhile would be in
neither. Held back until the first is about to end, it takes along whatever has arrived.

How long a step takes is guessed from the last one of its size. A guess that is too short costs nothing but some of that
gain; after one that is too long the device waits for as long as a message takes. So the lead, by which the decision
precedes the end, grows with every step that came too late, and shrinks slowly with every other: some in ten are late.
"""

from collections import deque
from dataclasses import dataclass

_FIRST_LEAD = 0.005  # seconds
_MIN_LEAD = 0.001
_MAX_LEAD = 0.1
_GROWTH = 1.25
_DECAY = 0.98
# A shorter wait is not worth it: on a CPU the extra wake-up takes 0.7 ms from a step of 12.
_MIN_HOLD = 0.02
# So long a device may do nothing between two steps that both were there in time.
_TOLERANCE = 0.0001


@dataclass(slots=True)
class _Sent:
    num_tokens: int
    time: float
    was_held: bool


class Pacer:
    """Guesses when the step that runs will end. Times are those of `time.monotonic`, in seconds."""

    def __init__(self, pipeline_depth: int) -> None:
        self._pipeline_depth = pipeline_depth
        self.num_late = 0  # steps that were held back too long: the device waited for them
        self.start_over()

    def start_over(self) -> None:
        """For an executor of unknown speed; nothing is in flight."""
        self._in_flight: deque[_Sent] = deque()
        self._last_result_time = 0.0
        self._is_holding = self._was_held = False
        self._last_of_size: dict[int, tuple[int, float]] = {}  # binary magnitude of tokens -> tokens, seconds
        self.lead = _FIRST_LEAD

    def seconds_to_hold(self, now: float) -> float:
        """How long to wait with the next decision; 0: decide now."""
        left = self._seconds_left(now) - self.lead
        is_holding = left > (0.0 if self._is_holding else _MIN_HOLD)
        self._was_held, self._is_holding = self._is_holding and not is_holding, is_holding
        return left if is_holding else 0.0

    def on_sent(self, num_tokens: int, now: float) -> None:
        """What was decided, right after seconds_to_hold() was 0, is on its way."""
        self._in_flight.append(_Sent(num_tokens, now, self._was_held))

    def on_result(self, execute_seconds: float, idle_seconds: float, now: float) -> None:
        """The oldest step in flight is done; before it the device had nothing to do for idle_seconds."""
        done = self._in_flight.popleft()
        self._last_result_time = now
        if done.num_tokens:  # else it only freed rows
            self._last_of_size[done.num_tokens.bit_length()] = (done.num_tokens, execute_seconds)
        if done.was_held and idle_seconds > _TOLERANCE:
            self.num_late += 1
            self.lead = min(self.lead * _GROWTH, _MAX_LEAD)
        else:
            self.lead = max(self.lead * _DECAY, _MIN_LEAD)

    def _seconds_left(self, now: float) -> float:
        """Until the running step ends; 0 if none runs, or if no other may be sent before it ends."""
        if not 0 < len(self._in_flight) < self._pipeline_depth:
            return 0.0
        running = self._in_flight[0]
        return max(running.time, self._last_result_time) + self._guess(running.num_tokens) - now

    def _guess(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens takes; rather too few than too many."""
        last_num_tokens, seconds = self._last_of_size.get(num_tokens.bit_length(), (1, 0.0))
        return seconds * min(1.0, num_tokens / last_num_tokens)
