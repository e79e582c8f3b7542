"""Which of several peers takes a request.

Requests that begin alike, as with the same system prompt, go to the same peer whoever asks: that with the highest hash
of beginning and address (rendezvous hashing), of those that have no more than a quarter over their share (consistent
hashing with bounded loads, Mirrokni et al. 2018). When a peer comes or goes, only the requests move whose peer that is.
A beginning so popular that one peer would have little else has several, and each conversation one of them. Requests
without an affinity go to whoever has the fewest.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_SLACK = 1.25
# So many each peer may have whatever its share: they take no longer together than alone.
_FREE = 8

# Of a peer's share of all requests, what one beginning may take up before it gets another peer.
_OF_A_PEER = 0.5
# Requests of which popularity is an average, and how many of no beginning it starts with.
_REMEMBERED = 2048
_UNKNOWN = 64

_choices = itertools.count(1)


class Affinity(NamedTuple):
    """Which requests had better be at the same peer: hashes, equal for those that begin alike and, of these, for those
    of one conversation."""

    beginning: bytes
    conversation: bytes


class Popularity:
    """Which part of the latest requests has which beginning."""

    def __init__(self) -> None:
        self._counts: dict[bytes, float] = {}
        self._total = float(_UNKNOWN)

    def seen(self, beginning: bytes) -> float:
        """A request has it; the part of the latest ones that have."""
        self._counts[beginning] = count = self._counts.get(beginning, 0.0) + 1
        self._total += 1
        share = count / self._total
        if self._total > _REMEMBERED:
            self._counts = {one: count / 2 for one, count in self._counts.items() if count > 1}
            self._total = sum(self._counts.values())
        return share


def preferred_of(peers: Sequence[Any]) -> Sequence[Any]:
    """Of those that are up: who is ready and will stay, or else who is ready, or else all."""
    up = [peer for peer in peers if peer.is_up]
    ready = [peer for peer in up if peer.is_ready] or up
    return [peer for peer in ready if peer.is_listed and not peer.is_draining] or ready


def choose(peers: Sequence[Any], affinity: Affinity | None = None, share: float = 0.0) -> Any:
    """One of the peers, of which there is at least one. share: of all requests, those that begin like this one."""
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
