"""Multiplexed streams: many requests of two services over one bidirectional gRPC stream.

The client side is a `Link`, which reconnects for as long as it runs; a `ResubmittingLink` has one to each of several
peers, among which it divides requests, and sends those of a stream that breaks again. The server side is a `Session`,
which sends from an `Outbox`: outputs of a request that were not sent yet are merged, so that a slow reader delays its
own requests only, and never takes memory without bound.
"""

from pagewire.streams.balancing import Affinity
from pagewire.streams.draining import Draining
from pagewire.streams.link import MAX_BACKOFF_S, BidiCall, Link, LinkOwner, OpenCall
from pagewire.streams.outbox import Outbox
from pagewire.streams.peer import Peer
from pagewire.streams.pings import Pings
from pagewire.streams.resubmitting_link import LinkedRequest, ResubmittingLink
from pagewire.streams.session import Session

__all__ = [
    "MAX_BACKOFF_S",
    "Affinity",
    "BidiCall",
    "Draining",
    "Link",
    "LinkOwner",
    "LinkedRequest",
    "OpenCall",
    "Outbox",
    "Peer",
    "Pings",
    "ResubmittingLink",
    "Session",
]
