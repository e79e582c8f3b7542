"""The client side of multiplexed streams that loses no request when one breaks."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from pagewire.wire.discovery import Discovery, Listed
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams.balancing import Affinity, Popularity, choose, preferred_of
from pagewire.wire.streams.link import MAX_BACKOFF_S, OpenCall
from pagewire.wire.streams.peer import Peer, Response
from pagewire.wire.streams.peer_list import PeerList
from pagewire.wire.streams.pings import Pings

logger = logging.getLogger(__name__)

# Requests that share one message; far below what gRPC takes.
MAX_SEND_BYTES = 16 * 1024 * 1024
# Seconds after which a new stream is taken to last. A service that dies again and again as it gets the same requests
# lives shorter, and these must not come back for ever.
SETTLED_S = 2 * MAX_BACKOFF_S
# Seconds after which requests leave a peer that says that it is not ready, if another one is: it may be so in a moment.
UNREADY_S = 2.0


class LinkedRequest(ABC):
    """One request, with what it takes to go on after a break."""

    __slots__ = ("affinity", "lost_at", "number", "peer", "was_sent")

    def __init__(self) -> None:
        self.number = 0  # unique on the link, another one wherever it is sent; 0 = not submitted
        self.was_sent = False  # another side may have let it in
        # time.monotonic() when the stream broke under it, until there is output again.
        self.lost_at: float | None = None
        self.affinity: Affinity | None = None  # of requests that had better be at the same peer
        self.peer: Any = None  # that has it; None: it waits for one

    @abstractmethod
    def to_submit(self) -> Any:
        """The protobuf message that starts it or, if was_sent, has it go on after the output received so far."""

    @abstractmethod
    def fail(self, error: RpcError) -> None:
        """It has ended with an error."""


R = TypeVar("R", bound=LinkedRequest)
Out = TypeVar("Out")
In = TypeVar("In", bound=Response)


class ResubmittingLink(ABC, Generic[R, Out, In]):
    """Carries requests until they end, each over the stream of one of several peers that do the same work.

    When a stream breaks, its requests are submitted again, to another peer or, where none is up, to the first that is;
    those that have waited for recovery_timeout seconds, without a stream that lasts, end with UNAVAILABLE. A peer that
    drains or leaves the list gets no new requests, unless there is no other. The latter is left when it has none.

    A subclass builds the messages and reads them.
    """

    def __init__(
        self,
        name: str,
        discovery: Discovery,
        connect: Callable[[Listed], grpc.aio.Channel],
        recovery_timeout: float,
    ) -> None:
        """connect: makes channels to peers. name is for the log and for errors ("tokenizer service")."""
        self._name = name
        self._connect = connect
        self._recovery_timeout = recovery_timeout
        self._list = PeerList(discovery, self._make_peer)
        self.peers: list[Peer[Out, In]] = self._list.peers  # changes in place
        self._numbers = itertools.count(1)
        self._live: dict[int, R] = {}
        self._popularity = Popularity()
        self._idle = asyncio.Event()  # no request is live
        self._idle.set()
        self._away_since: float | None = time.monotonic()  # None = a peer is up
        self._has_been_up = False
        self.num_breaks = 0  # of streams that were up
        self._given_up = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def open(self, channel: grpc.aio.Channel) -> tuple[OpenCall[Out, In], Pings | None]:
        """What starts a peer's stream (`stub.Connect`), and what asks how the peer is."""

    @abstractmethod
    def build_message(self, submits: list[Any], aborts: list[int]) -> Out:
        """submits: what LinkedRequest.to_submit() returned; aborts: numbers."""

    @abstractmethod
    def on_response(self, message: In) -> None:
        """Hands outputs to their requests: see answered() and finish(). An exception here breaks the stream."""

    def check_greeting(self, peer: Peer[Out, In], message: In) -> None:
        """A stream's first message. Raises RpcError if the peer is not to be used now."""

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether a peer has spoken on its present stream."""
        return self._away_since is None

    @property
    def is_available(self) -> bool:
        """Whether requests can be served, now or after a short interruption; not before the first stream."""
        return self._has_been_up and not self._given_up

    @property
    def is_ready(self) -> bool:
        """Whether requests would be served now: a peer is there, and says that it is ready."""
        return any(peer.is_ready for peer in self.peers)

    @property
    def changed(self) -> asyncio.Event:
        """Set once `is_available` or `is_ready` may differ from now; get it before you look."""
        return self._changed

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def drained(self) -> None:
        """Returns when no request is live."""
        await self._idle.wait()

    def choose(self, affinity: Affinity | None = None) -> Peer[Out, In] | None:
        """Whose a new request is; None: no peer is up."""
        share = self._popularity.seen(affinity.beginning) if affinity else 0.0
        preferred = preferred_of(self.peers)
        return choose(preferred, affinity, share) if preferred else None

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: R) -> None:
        """Starts a request, or queues it while all peers are away.

        Raises RpcError UNAVAILABLE if they have been for recovery_timeout seconds.
        """
        if self._given_up:
            raise self._unavailable()
        request.lost_at = self._away_since
        self._idle.clear()
        self._place(request)

    def abort(self, request: R) -> None:
        """Ends a request of which nobody wants to hear any more; does nothing if it has ended."""
        if request.number in self._live:
            self._leave(request)
            self._forget(request)

    def fail(self, request: R, error: RpcError) -> None:
        """Ends a request with an error, here and at the other side; does nothing if it has ended."""
        if request.number in self._live:
            self.abort(request)
            request.fail(error)

    def fail_all(self, code: grpc.StatusCode, message: str) -> None:
        for request in list(self._live.values()):
            self.fail(request, RpcError(code, message))

    def answered(self, number: int) -> R | None:
        """The request for which output has arrived; None if it was aborted, or moved, and this was on its way."""
        request = self._live.get(number)
        if request is not None:
            request.lost_at = None
        return request

    def finish(self, request: R) -> None:
        """Lets go of a request that the other side has ended."""
        if request.peer is not None:
            request.peer.num_requests -= 1
        self._forget(request)

    def _forget(self, request: R) -> None:
        request.peer = None
        del self._live[request.number]
        self._list.on_progress()
        if not self._live:
            self._idle.set()

    def _place(self, request: R) -> None:
        """Has it sent to the peer that is to have it; it waits while there is none."""
        self._live.pop(request.number, None)
        request.number = next(self._numbers)  # what a peer that had it before still says is for nobody
        self._live[request.number] = request
        request.peer = self.choose(request.affinity)
        if request.peer is not None:
            request.peer.submit(request)

    def _leave(self, request: R) -> None:
        """Has its peer end it."""
        if request.peer is not None:
            request.peer.abort(request.number)

    # -- the peers ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the streams up and sends, until cancelled."""
        self._watch()
        try:
            await self._list.run()
        finally:
            self._stop_timer()

    def _make_peer(self, listed: Listed) -> Peer[Out, In]:
        channel = self._connect(listed)
        open_call, pings = self.open(channel)
        return Peer(f"{self._name} at {listed.address}", listed, channel, open_call, pings, self)

    def take_message(self, peer: Peer[Out, In]) -> Out:
        aborts, peer.aborts = peer.aborts, []
        submits: list[Any] = []
        size = 0
        while peer.unsent and size < MAX_SEND_BYTES:
            request = peer.unsent.pop(next(iter(peer.unsent)))
            submits.append(request.to_submit())
            request.was_sent = True
            size += submits[-1].ByteSize()
        return self.build_message(submits, aborts)

    def on_up(self, peer: Peer[Out, In]) -> None:
        self._away_since = None
        self._has_been_up = True
        self._given_up = False
        self._start_timer(SETTLED_S, self._settle)
        for request in [request for request in self._live.values() if request.peer is None]:
            self._place(request)
        self._notify()

    def on_down(self, peer: Peer[Out, In]) -> None:
        now = time.monotonic()
        self.num_breaks += 1
        lost = [request for request in self._live.values() if request.peer is peer]
        for request in lost:
            request.peer = None
            if request.lost_at is None:
                request.lost_at = now
        if any(other.is_up for other in self.peers):
            self._start_timer(SETTLED_S, self._settle)
            self._move(lost, now)
        else:
            self._away_since = now
            self._watch()
        self._list.on_progress()
        self._notify()

    def on_ping(self, peer: Peer[Out, In]) -> None:
        self._notify()
        if peer.is_up and not peer.is_ready and len(self.peers) > 1:
            asyncio.get_running_loop().call_later(UNREADY_S, self._leave_unready, peer)

    def _leave_unready(self, peer: Peer[Out, In]) -> None:
        """Its requests go to others, if these are ready."""
        if peer.is_up and not peer.is_ready and self.is_ready:
            requests = [request for request in self._live.values() if request.peer is peer]
            for request in requests:
                self._leave(request)
            self._move(requests, time.monotonic())
            self._list.on_progress()

    def _move(self, requests: Sequence[R], now: float) -> None:
        """To peers that are up; whoever has been without a stream that lasts for too long ends."""
        for request in requests:
            if request.lost_at is not None and request.lost_at <= now - self._recovery_timeout:
                request.peer = None
                self.fail(request, self._unavailable())
            else:
                self._place(request)

    # -- the bound on recovery ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The streams last: it is not lost any more who merely waits for output."""
        for request in self._live.values():
            request.lost_at = None

    def _watch(self) -> None:
        """Has the first end that has waited too long while all peers are away."""
        assert self._away_since is not None
        first = min((r.lost_at for r in self._live.values() if r.lost_at is not None), default=self._away_since)
        self._start_timer(max(0.0, first + self._recovery_timeout - time.monotonic()), self._expire)

    def _expire(self) -> None:
        assert self._away_since is not None
        overdue = time.monotonic() - self._recovery_timeout
        late = [r for r in self._live.values() if r.lost_at is not None and r.lost_at <= overdue]
        if self._away_since > overdue:
            self._watch()
        else:
            self._given_up = True
            self._notify()
        if late or self._given_up:
            logger.error("%s; %d requests fail", self._unavailable().message, len(late))
        for request in late:
            self.fail(request, self._unavailable())

    def _unavailable(self) -> RpcError:
        return RpcError(
            grpc.StatusCode.UNAVAILABLE,
            f"the {self._name} has been away for more than {self._recovery_timeout:g} s (--recovery-timeout); try "
            "again later",
        )

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
