"""Which of several peers takes a request.

Requests with an affinity, as those of one conversation have, go to the same peer whoever asks: that with the highest
hash of affinity and address (rendezvous hashing), of those that have no more than a quarter over their share
(consistent hashing with bounded loads, Mirrokni et al. 2018). When a peer comes or goes, only the requests move whose
peer that is. Others go to whoever has the fewest.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

_SLACK = 1.25
# So many each peer may have whatever its share: they take no longer together than alone.
_FREE = 8

_choices = itertools.count(1)


def choose(peers: Sequence[Any], affinity: bytes = b"") -> Any:
    """One of the peers, of which there is at least one. affinity: b"" = none."""
    if len(peers) == 1:
        return peers[0]
    if affinity:
        most = max(_FREE, _SLACK * (1 + sum(peer.load for peer in peers)) / len(peers))
        able = [peer for peer in peers if peer.load < most]
        return max(able, key=lambda peer: _weight(affinity, peer.address))
    chosen = min(peers, key=lambda peer: (peer.load, peer.last_choice))
    chosen.last_choice = next(_choices)
    return chosen


def _weight(affinity: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=affinity[:64], digest_size=8).digest()
