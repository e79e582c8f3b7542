"""What drafts cost: the seconds of steps without and with them.

The executor has measured at start how long steps of so many tokens take. How much longer they take in service, as
contexts are longer and cores are shared, is learned of steps without drafts; how much more those with drafts differ
from that, as proposers take time too, is learned apart. Steps with prompts say nothing of either.
"""

from collections.abc import Sequence
from itertools import pairwise

# Twenty steps are remembered, and one is believed to differ so much from what was expected.
_KEPT = 0.95
_LEAST, _MOST = 0.5, 1.5


class _Ratio:
    """Of what was measured to what was expected; 1 as long as little is known."""

    def __init__(self) -> None:
        self._measured = self._expected = 0.0
        self.value = 1.0

    def learn(self, measured: float, expected: float) -> None:
        expected_now = expected * self.value
        measured = min(max(measured, _LEAST * expected_now), _MOST * expected_now)
        self._measured = self._measured * _KEPT + measured
        self._expected = self._expected * _KEPT + expected
        self.value = self._measured / self._expected


class DraftCosts:
    """Seconds of steps without prompts."""

    def __init__(self, measured: Sequence[tuple[int, float]], draft_seconds: float) -> None:
        """measured: (tokens, seconds) of steps, rising in tokens, at least one. draft_seconds: of a proposer, for each
        token of the longest draft."""
        self._sizes = [tokens for tokens, _ in measured]
        self._seconds = list[float]()
        for _, seconds in measured:  # a larger step that was faster had luck
            self._seconds.append(max([seconds, *self._seconds[-1:]]))
        self._last_slope = self._slope(len(measured) - 2) if len(measured) > 1 else 0.0
        self._draft_seconds = draft_seconds
        self._plain = _Ratio()
        self._drafted = _Ratio()  # to what is expected of plain ones

    def plain(self, num_tokens: float) -> float:
        """Of a step in which as many requests have one token each."""
        return self._curve(num_tokens) * self._plain.value

    def drafted(self, num_requests: float, num_drafts: float, longest: int) -> float:
        """Of one in which they also check so many drafts, `longest` of one request."""
        expected = self._curve(num_requests + num_drafts) + longest * self._draft_seconds
        return expected * self._plain.value * self._drafted.value

    def learn(self, num_requests: int, num_drafts: int, longest: int, seconds: float) -> None:
        """A step took so long."""
        if num_drafts:
            expected = self._curve(num_requests + num_drafts) + longest * self._draft_seconds
            self._drafted.learn(seconds, expected * self._plain.value)
        else:
            self._plain.learn(seconds, self._curve(num_requests))

    def _curve(self, num_tokens: float) -> float:
        """As measured; between sizes and beyond the last on straight lines."""
        sizes, seconds = self._sizes, self._seconds
        if num_tokens >= sizes[-1]:
            return seconds[-1] + (num_tokens - sizes[-1]) * self._last_slope
        for i, (left, right) in enumerate(pairwise(sizes)):
            if num_tokens < right:
                return seconds[i] + max(0.0, num_tokens - left) * self._slope(i)
        return seconds[0]

    def _slope(self, index: int) -> float:
        return (self._seconds[index + 1] - self._seconds[index]) / (self._sizes[index + 1] - self._sizes[index])
