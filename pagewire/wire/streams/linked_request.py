"""A request on a link that resubmits it."""

from abc import ABC, abstractmethod
from typing import Any

from pagewire.wire.rpc import RpcError
from pagewire.wire.streams.balancing import Affinity


class LinkedRequest(ABC):
    """A request, with the state from which it continues after a broken stream."""

    __slots__ = ("affinity", "lost_at", "number", "peer", "was_sent")

    def __init__(self) -> None:
        self.number = 0  # unique on the link, new each time it is sent; 0: not submitted
        self.was_sent = False  # a peer may have accepted it
        # time.monotonic() when its stream broke, until there is output again.
        self.lost_at: float | None = None
        self.affinity: Affinity | None = None  # to requests that should be at the same peer
        self.peer: Any = None  # the peer that has it; None: it waits for one

    @abstractmethod
    def to_submit(self) -> Any:
        """Returns the message that starts it or, if was_sent, continues it after the output received so far."""

    @abstractmethod
    def fail(self, error: RpcError) -> None:
        """Ends it with an error."""
