"""The cost of drafts: the durations of steps with drafts, compared with steps without.

At its start, the executor measures steps by their number of tokens, and rounds of each method, in which some requests
get one draft each. In service, all steps are slower or faster by a factor that always changes, as contexts grow and
other processes use the cores. The factor affects steps with and without drafts alike, so only neighboring steps are
compared, one of each kind. Their difference from the measured one is attributed to the rounds of the methods that
drafted: the time of a round, and what makes checking drafts more expensive than a step of as many requests. It is kept
apart for each method, and for small and large steps: a small model's round costs a lone request much less than a step,
and many requests almost as much. Steps with prompts are ignored.

It is separate from the cost model of steps (`cost_model.py`) because it learns the ratio of two neighboring steps, not
seconds, and because the measured curve has jumps where that model has a straight line. Speculation by the straight line
was slower: 88 % instead of 106 % of the best constant number of drafts, with 32 requests and likely drafts.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

# Standard deviations. The first three are of the cost of a round as a share of a plain step: relative to the measured
# cost, independent of it, and from one comparison to the next. The last is of the logarithm of a step's time.
_OF_MEASURED, _OF_SHARE, _SHARE_DRIFT, _NOISE = 0.5, 0.15, 0.03, 0.17
# The largest accepted deviation of two steps from the expectation, as a logarithm: beyond it, one step has stalled.
_MOST_SURPRISE = 0.7
_VAGUE = 0.1
# The share of a round that was not measured.
_UNKNOWN = 0.5

Points = Sequence[tuple[int, float]]


class Drafted(NamedTuple):
    """The drafts of one method in a step. They take as many rounds as the longest has tokens."""

    method: int
    num_drafts: float
    longest: float

    @property
    def num_rounds(self) -> float:
        return min(self.longest, self.num_drafts)


class _Step(NamedTuple):
    num_requests: int
    drafts: Sequence[Drafted]
    seconds: float


class _Share:
    """The mean and the variance of what a round costs beyond the measured time, as a share of a plain step."""

    __slots__ = ("mean", "variance")

    def __init__(self, variance: float) -> None:
        self.mean, self.variance = 0.0, variance


class DraftCosts:
    """The costs of steps without prompts. Seconds are as measured at the executor's start; only their ratios are
    valid."""

    def __init__(self, measured: Points, rounds: Sequence[Points] = ((),)) -> None:
        """measured: (tokens, seconds) of steps, rising in tokens, at least one. rounds: by method, (requests, seconds)
        of rounds, rising in requests; none: unknown."""
        self._steps = _Curve(measured)
        self._rounds = rounds
        self._shares: dict[tuple[int, int], _Share] = {}  # by method and size
        self._last: _Step | None = None

    def plain(self, num_tokens: float) -> float:
        """Returns the seconds of a step in which `num_tokens` requests have one token each."""
        return self._steps.at(num_tokens)

    def drafted(self, num_requests: float, drafts: Sequence[Drafted]) -> float:
        """Returns the seconds of a step that also makes and checks drafts."""
        plain, num_drafts = self.plain(num_requests), sum(one.num_drafts for one in drafts)
        if not num_drafts:
            return plain
        rounds = sum(one.num_rounds * self._round_share(num_requests, one) for one in drafts if one.num_drafts)
        return max(plain, self.plain(num_requests + num_drafts) + rounds * plain)

    def are_vague(self, method: int, num_requests: int) -> bool:
        """Returns whether few steps of about this size have been compared."""
        return self._share(method, num_requests).variance > _VAGUE**2

    def learn(self, num_requests: int, drafts: Sequence[Drafted], seconds: float) -> None:
        """Learns from the duration of a step. drafts: those that were found, not empty."""
        last, step = self._last, _Step(num_requests, drafts, seconds)
        self._last = step
        if last is not None and bool(last.drafts) != bool(drafts):
            self._compare(*((step, last) if drafts else (last, step)))

    def forget_last(self) -> None:
        """Forgets the last step, because a step of another kind separates it from the next."""
        self._last = None

    def _compare(self, drafted: _Step, plain: _Step) -> None:
        """Corrects the shares of the methods by a Kalman filter that takes its states as independent."""
        num_requests = drafted.num_requests
        expected = self.drafted(num_requests, drafted.drafts)
        surprise = math.log(drafted.seconds / expected) - math.log(plain.seconds / self.plain(plain.num_requests))
        surprise = min(max(surprise, -_MOST_SURPRISE), _MOST_SURPRISE)
        shares = [self._share(one.method, num_requests) for one in drafted.drafts]
        # Of the shares on the logarithm.
        effects = [one.longest * self.plain(num_requests) / expected for one in drafted.drafts]
        for share in shares:
            share.variance += _SHARE_DRIFT**2
        total = sum(share.variance * effect**2 for share, effect in zip(shares, effects, strict=True)) + 2 * _NOISE**2
        for share, effect in zip(shares, effects, strict=True):
            gain = share.variance * effect / total
            share.mean += gain * surprise
            share.variance *= 1 - gain * effect

    def _share(self, method: int, num_requests: float) -> _Share:
        size = int(num_requests).bit_length()
        share = self._shares.get((method, size))
        if share is None:
            measured = self._measured_share(method, num_requests, num_requests)
            share = self._shares[method, size] = _Share((_OF_MEASURED * measured + _OF_SHARE) ** 2)
        return share

    def _round_share(self, num_requests: float, drafts: Drafted) -> float:
        """Returns the cost of a round as a share of a plain step."""
        num_drafting = max(1.0, drafts.num_drafts / drafts.longest)
        measured = self._measured_share(drafts.method, num_requests, num_drafting)
        return measured + self._share(drafts.method, num_requests).mean

    def _measured_share(self, method: int, num_requests: float, num_drafting: float) -> float:
        points, of_drafting = self._rounds[method], self.plain(num_drafting)
        if len(points) > 1:
            seconds = _Curve(points).at(num_drafting)
        else:
            share = points[0][1] / self.plain(points[0][0]) if points else _UNKNOWN
            seconds = share * of_drafting
        return min(seconds, of_drafting) / self.plain(num_requests)  # a proposer is never slower than the model


class _Curve:
    """Measured seconds, with linear interpolation between sizes and beyond the last one."""

    def __init__(self, points: Points) -> None:
        self._sizes = [size for size, _ in points]
        self._seconds = list[float]()
        for _, seconds in points:  # a larger step is not faster; that was noise
            self._seconds.append(max([seconds, *self._seconds[-1:]]))
        self._last_slope = self._slope(len(points) - 2) if len(points) > 1 else 0.0

    def at(self, size: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        if size >= sizes[-1]:
            return seconds[-1] + (size - sizes[-1]) * self._last_slope
        for i, (left, right) in enumerate(pairwise(sizes)):
            if size < right:
                return seconds[i] + max(0.0, size - left) * self._slope(i)
        return seconds[0]

    def _slope(self, index: int) -> float:
        return (self._seconds[index + 1] - self._seconds[index]) / (self._sizes[index + 1] - self._sizes[index])
