"""Multiplexed streams: many requests of two services over one bidirectional gRPC stream.

The client side is a `Link`, which reconnects for as long as it runs; a `ResubmittingLink` has one to each of several
peers, among which it divides requests, and sends those of a stream that breaks again. The server side is a `Session`,
which sends from an `Outbox`: outputs of a request that were not sent yet are merged, so that a slow reader delays its
own requests only, and never takes memory without bound.
"""

from pagewire.wire.streams.balancing import Affinity
from pagewire.wire.streams.draining import Draining
from pagewire.wire.streams.link import MAX_BACKOFF_S, BidiCall, Link, LinkOwner, OpenCall
from pagewire.wire.streams.outbox import Outbox
from pagewire.wire.streams.peer import Peer
from pagewire.wire.streams.pings import Pings
from pagewire.wire.streams.resubmitting_link import LinkedRequest, ResubmittingLink
from pagewire.wire.streams.session import Session

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
