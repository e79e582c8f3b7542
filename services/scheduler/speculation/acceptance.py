"""The share of drafts that a request accepts, learned from its own steps and, while these are few, from those of its
tenant's other requests.

Each position has a share: the accepted drafts among those that follow accepted ones, as the mean of a beta distribution
with forgetting: (accepted + weight * prior) / (tried + weight). The product of the first j shares is the chance that
draft j counts. If an executor drafts only what it finds, the share of found drafts is learned separately: a draft that
is not found costs nothing, and reveals nothing about those that are.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from pagewire.services.scheduler.values.request import Request

# Assumed while nothing is known: better than most texts, so that drafts are tried.
_FIRST_PRIOR = 0.7
# The weight of a prior in observations, and the share of an observation that remains after the next one. What is found
# in a text depends on the text, which changes within a few steps; a tenant's usage changes slowly. How often a model is
# right depends on the model more than on the text.
_WEIGHT, _KEPT = 3.0, 0.8
_WEIGHT_OF_MODEL, _KEPT_BY_MODEL = 10.0, 0.9
_KEPT_OF_SHARED = 0.99
# The number of observations of other requests after which a request uses them again.
_STALE_AFTER = 32
_KEPT_OF_STALE = 0.5
# Chances are rounded to multiples of 1 / _GRAIN, so that there are fewer cases to compare.
_GRAIN = 64


class Acceptance:
    """The acceptance of one request, or of a tenant's requests."""

    __slots__ = (
        "_accepted",
        "_asked",
        "_chances",
        "_found",
        "_kept",
        "_shared",
        "_shared_seen",
        "_tried",
        "_weight",
        "num_seen",
    )

    def __init__(self, max_drafts: int, shared: "Acceptance | None" = None, *, by_model: bool = False) -> None:
        """max_drafts: the limit of a step. shared: for a request, that of its tenant, which also learns from the
        request's steps. by_model: a model drafts."""
        self._shared = shared
        self._kept = _KEPT_OF_SHARED if shared is None else _KEPT_BY_MODEL if by_model else _KEPT
        self._weight = _WEIGHT_OF_MODEL if by_model and shared is not None else _WEIGHT
        self._accepted = [0.0] * max_drafts  # by position
        self._tried = [0.0] * max_drafts
        self._asked = self._found = 0.0  # numbers of drafts
        self._chances: list[float] | None = None
        self._shared_seen = 0
        self.num_seen = 0  # steps that it has learned from

    def learn(self, num_asked: int, num_drafted: int, num_accepted: int) -> None:
        """Learns from a step that asked for `num_asked` drafts, found `num_drafted`, and accepted the first
        `num_accepted`."""
        if self._shared is not None:
            self._shared.learn(num_asked, num_drafted, num_accepted)
        kept = self._kept
        self.num_seen += 1
        self._chances = None
        self._asked = self._asked * kept + num_asked
        self._found = self._found * kept + num_drafted
        if not num_drafted:
            return
        self._forget(kept)
        for i in range(min(num_accepted + 1, num_drafted)):  # drafts after a rejected one were not tried
            self._tried[i] += 1.0
        for i in range(num_accepted):
            self._accepted[i] += 1.0

    def _forget(self, kept: float) -> None:
        self._tried = [count * kept for count in self._tried]
        self._accepted = [count * kept for count in self._accepted]

    @property
    def share_found(self) -> float:
        """The share of requested drafts that are found."""
        prior = 1.0 if self._shared is None else self._shared.share_found
        drafts = _WEIGHT * len(self._tried)
        return (self._found + drafts * prior) / (self._asked + drafts)

    def chances(self) -> Sequence[float]:
        """Returns falling chances: [j] is the chance that draft j counts if it is found."""
        shared = self._shared
        is_stale = shared is not None and shared.num_seen - self._shared_seen >= _STALE_AFTER
        if is_stale and self._chances is not None:
            self._forget(_KEPT_OF_STALE)  # not tried while others were, so it may now resemble them
        if self._chances is None or is_stale:
            chance, chances = 1.0, []
            for share in self._shares():
                chance *= share
                chances.append(round(chance * _GRAIN) / _GRAIN)
            self._chances = chances
            self._shared_seen = 0 if shared is None else shared.num_seen
        return self._chances

    def _shares(self) -> list[float]:
        """Returns the share of accepted drafts among the tried ones, by position."""
        shares = list[float]()
        priors = None if self._shared is None else self._shared._shares()
        for i, (accepted, tried) in enumerate(zip(self._accepted, self._tried, strict=True)):
            # For shared acceptance, a position is like the previous one until more is known.
            prior = priors[i] if priors is not None else shares[-1] if shares else _FIRST_PRIOR
            shares.append((accepted + self._weight * prior) / (tried + self._weight))
        return shares


# The acceptance of live requests on all executors, by the method's name.
Acceptances = WeakKeyDictionary[Request, dict[str, Acceptance]]
