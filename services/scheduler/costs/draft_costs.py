"""The cost of drafts: the durations of steps with drafts, compared with steps without.

At its start, the executor measures steps by their number of tokens, and the time of its proposer. In service, all steps
are slower or faster by a factor that always changes, as contexts grow and other processes use the cores. The factor
affects steps with and without drafts alike, so only neighboring steps are compared, one of each kind. Their difference
from the measured one is attributed to the tokens of the longest draft: the proposer's time, and what makes checking
drafts more expensive than a step of as many requests. Steps with prompts are ignored.

It is separate from the cost model of steps (`cost_model.py`) because it learns the ratio of two neighboring steps, not
seconds, and because the measured curve has jumps where that model has a straight line. Speculation by the straight line
was slower: 88 % instead of 106 % of the best constant number of drafts, with 32 requests and likely drafts.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

# Standard deviations. The first three are of the cost of a draft's token as a share of a plain step: relative to the
# measured cost, independent of it, and from one comparison to the next. The last is of the logarithm of a step's time.
_OF_MEASURED, _OF_SHARE, _SHARE_DRIFT, _NOISE = 0.5, 0.15, 0.03, 0.17
# The largest accepted deviation of two steps from the expectation, as a logarithm: beyond it, one step has stalled.
_MOST_SURPRISE = 0.7
_VAGUE = 0.1


class _Step(NamedTuple):
    num_requests: int
    num_drafts: int
    longest: int
    seconds: float


class DraftCosts:
    """The costs of steps without prompts. Seconds are as measured at the executor's start; only their ratios are
    valid."""

    def __init__(self, measured: Sequence[tuple[int, float]], draft_seconds: float) -> None:
        """measured: (tokens, seconds) of steps, rising in tokens, at least one. draft_seconds: the proposer's time for
        each token of the longest draft."""
        self._sizes = [tokens for tokens, _ in measured]
        self._seconds = list[float]()
        for _, seconds in measured:  # a larger step is not faster; that was noise
            self._seconds.append(max([seconds, *self._seconds[-1:]]))
        self._last_slope = self._slope(len(measured) - 2) if len(measured) > 1 else 0.0
        self._share = min(draft_seconds / self._seconds[0], 1.0)  # a proposer is never slower than the model
        self._variance = (_OF_MEASURED * self._share + _OF_SHARE) ** 2
        self._last: _Step | None = None

    def plain(self, num_tokens: float) -> float:
        """Returns the seconds of a step in which `num_tokens` requests have one token each."""
        return self._curve(num_tokens)

    def drafted(self, num_requests: float, num_drafts: float, longest: float) -> float:
        """Returns the seconds of a step that also checks `num_drafts` drafts, at most `longest` of one request."""
        plain = self._curve(num_requests)
        if not num_drafts:
            return plain
        return max(plain, self._curve(num_requests + num_drafts) + min(longest, num_drafts) * self._share * plain)

    @property
    def are_vague(self) -> bool:
        """True while few steps have been compared."""
        return self._variance > _VAGUE**2

    def learn(self, num_requests: int, num_drafts: int, longest: int, seconds: float) -> None:
        """Learns from the duration of a step."""
        last, step = self._last, _Step(num_requests, num_drafts, longest, seconds)
        self._last = step
        if last is not None and bool(last.num_drafts) != bool(num_drafts):
            drafted, plain = (step, last) if num_drafts else (last, step)
            self._compare(drafted, plain)

    def forget_last(self) -> None:
        """Forgets the last step, because a step of another kind separates it from the next."""
        self._last = None

    def _compare(self, drafted: _Step, plain: _Step) -> None:
        """Corrects the share by a Kalman filter with one state."""
        expected = self.drafted(drafted.num_requests, drafted.num_drafts, drafted.longest)
        surprise = math.log(drafted.seconds / expected) - math.log(plain.seconds / self._curve(plain.num_requests))
        surprise = min(max(surprise, -_MOST_SURPRISE), _MOST_SURPRISE)
        effect = drafted.longest * self._curve(drafted.num_requests) / expected  # of the share on the logarithm
        self._variance += _SHARE_DRIFT**2
        gain = self._variance * effect / (self._variance * effect**2 + 2 * _NOISE**2)
        self._share += gain * surprise
        self._variance *= 1 - gain * effect

    def _curve(self, num_tokens: float) -> float:
        """Returns the measured seconds, with linear interpolation between sizes and beyond the last one."""
        sizes, seconds = self._sizes, self._seconds
        if num_tokens >= sizes[-1]:
            return seconds[-1] + (num_tokens - sizes[-1]) * self._last_slope
        for i, (left, right) in enumerate(pairwise(sizes)):
            if num_tokens < right:
                return seconds[i] + max(0.0, num_tokens - left) * self._slope(i)
        return seconds[0]

    def _slope(self, index: int) -> float:
        return (self._seconds[index + 1] - self._seconds[index]) / (self._sizes[index + 1] - self._sizes[index])
