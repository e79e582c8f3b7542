"""Multiplexed streams: many requests of two services over one bidirectional gRPC stream.

The client side is a `Link`, which reconnects while it runs. A `ResubmittingLink` has a link to each of several peers,
divides requests among them, and sends the requests of a broken stream again. The server side is a `Session`, which
sends from an `Outbox`: unsent outputs of a request are merged, so that a slow reader delays only its own requests and
never takes unbounded memory.
"""

from pagewire.wire.streams.balancing import Affinity
from pagewire.wire.streams.draining import Draining
from pagewire.wire.streams.link import MAX_BACKOFF_S, BidiCall, Link, LinkOwner, OpenCall
from pagewire.wire.streams.linked_request import LinkedRequest
from pagewire.wire.streams.outbox import Outbox
from pagewire.wire.streams.peer import Peer
from pagewire.wire.streams.pings import Pings
from pagewire.wire.streams.resubmitting_link import ResubmittingLink
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
