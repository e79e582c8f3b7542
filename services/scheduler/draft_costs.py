"""What drafts cost: the seconds of steps without and with them.

The executor has measured at start how long steps of so many tokens take, and what its proposer takes. How much longer
steps take in service, as contexts are longer and cores are shared, is learned of those without drafts. What remains of
those with drafts is what each token of the longest draft costs: the proposer's time, and whatever makes checking dearer
than a step of as many requests. Steps with prompts say nothing of either.
"""

from collections.abc import Sequence
from itertools import pairwise

# Twenty steps are remembered, and one is believed to differ so much from what was expected.
_KEPT = 0.95
_LEAST, _MOST = 0.5, 1.5
_MEASURED = 8.0  # drafted tokens that count as much as what was measured at start, where others may have been busy, too


def _believed(seconds: float, expected: float) -> float:
    return min(max(seconds, _LEAST * expected), _MOST * expected)


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
        self._measured = self._expected = 0.0  # seconds of plain steps
        self._slowness = 1.0  # in service, to what was measured at start
        # One that is slower than the model is none.
        self._rest, self._longest = _MEASURED * min(draft_seconds, self._seconds[0]), _MEASURED

    def plain(self, num_tokens: float) -> float:
        """Of a step in which as many requests have one token each."""
        return self._curve(num_tokens) * self._slowness

    def drafted(self, num_requests: float, num_drafts: float, longest: int) -> float:
        """Of one in which they also check so many drafts, `longest` of one request."""
        seconds = self._curve(num_requests + num_drafts) + longest * self._rest / self._longest
        return max(seconds, self._curve(num_requests)) * self._slowness

    def learn(self, num_requests: int, num_drafts: int, longest: int, seconds: float) -> None:
        """A step took so long."""
        if num_drafts:
            seconds = _believed(seconds, self.drafted(num_requests, num_drafts, longest)) / self._slowness
            self._rest = self._rest * _KEPT + seconds - self._curve(num_requests + num_drafts)
            self._longest = self._longest * _KEPT + longest
        else:
            self._measured = self._measured * _KEPT + _believed(seconds, self.plain(num_requests))
            self._expected = self._expected * _KEPT + self._curve(num_requests)
            self._slowness = self._measured / self._expected

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
