"""Chooses one of several peers for a request.

Requests with the same beginning, for instance a system prompt, go to the same peer from every client: to the one with
the highest hash of beginning and address (rendezvous hashing) among peers with at most a quarter over their share
(consistent hashing with bounded loads, Mirrokni et al. 2018). When a peer comes or goes, only its own requests move. A
beginning that would fill one peer gets several, and each conversation stays with one of them. Requests without an
affinity go to the peer with the fewest requests.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_SLACK = 1.25
# Each peer may have this many regardless of its share: together they take no longer than alone.
_FREE = 8

# The part of a peer's share that one beginning may use before it gets another peer.
_OF_A_PEER = 0.5
# Popularity averages over this many requests, and starts with some requests without a beginning.
_REMEMBERED = 2048
_UNKNOWN = 64

_choices = itertools.count(1)


class Affinity(NamedTuple):
    """Hashes that are equal for requests that should be at the same peer: with the same beginning, and in one
    conversation."""

    beginning: bytes
    conversation: bytes


class Popularity:
    """The share of each beginning among recent requests."""

    def __init__(self) -> None:
        self._counts: dict[bytes, float] = {}
        self._total = float(_UNKNOWN)

    def seen(self, beginning: bytes) -> float:
        """Counts a request with this beginning, and returns the share of the beginning."""
        self._counts[beginning] = count = self._counts.get(beginning, 0.0) + 1
        self._total += 1
        share = count / self._total
        if self._total > _REMEMBERED:
            self._counts = {one: count / 2 for one, count in self._counts.items() if count > 1}
            self._total = sum(self._counts.values())
        return share


def preferred_of(peers: Sequence[Any]) -> Sequence[Any]:
    """Returns the peers to choose from: ready ones that stay, else ready ones, else all that are up."""
    up = [peer for peer in peers if peer.is_up]
    ready = [peer for peer in up if peer.is_ready] or up
    return [peer for peer in ready if peer.is_listed and not peer.is_draining] or ready


def choose(peers: Sequence[Any], affinity: Affinity | None = None, share: float = 0.0) -> Any:
    """Returns one of the peers, at least one. share: of all requests, those with the same beginning."""
    if len(peers) == 1:
        return peers[0]
    if affinity:
        most = max(_FREE, _SLACK * (1 + sum(peer.load for peer in peers)) / len(peers))
        ranked = sorted(peers, key=lambda peer: _weight(affinity.beginning, peer.address), reverse=True)
        able = [peer for peer in ranked if peer.load < most]
        count = max(1, math.ceil(share * len(peers) / _OF_A_PEER))
        own = [peer for peer in ranked[:count] if peer.load < most] or able[:1]
        return max(own, key=lambda peer: _weight(affinity.conversation, peer.address))
    chosen = min(peers, key=lambda peer: (peer.load, peer.last_choice))
    chosen.last_choice = next(_choices)
    return chosen


def _weight(affinity: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=affinity[:64], digest_size=8).digest()
