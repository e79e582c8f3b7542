"""The client side of multiplexed streams that loses no request when one breaks."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from pagewire.wire.discovery.listed import Discovery, Listed
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams.balancing import Affinity, Popularity, choose, preferred_of
from pagewire.wire.streams.link import MAX_BACKOFF_S, OpenCall
from pagewire.wire.streams.linked_request import LinkedRequest
from pagewire.wire.streams.peer import Peer, Response
from pagewire.wire.streams.peer_list import PeerList
from pagewire.wire.streams.pings import Pings

logger = logging.getLogger(__name__)

# Most bytes of requests in one message; far below the limit of gRPC.
MAX_SEND_BYTES = 16 * 1024 * 1024
# Seconds after which a new stream counts as lasting. A service that repeatedly dies from the same requests has shorter
# streams, and these requests must not be sent forever.
SETTLED_S = 2 * MAX_BACKOFF_S
# Seconds after which requests leave a peer that is not ready for one that is; it may become ready in a moment.
UNREADY_S = 2.0


R = TypeVar("R", bound=LinkedRequest)
Out = TypeVar("Out")
In = TypeVar("In", bound=Response)


class ResubmittingLink(ABC, Generic[R, Out, In]):
    """Carries requests until they end, each over the stream of one of several peers that do the same work.

    When a stream breaks, its requests are submitted again, to another peer or, if none is up, to the first that comes
    up. Requests that have waited for recovery_timeout seconds without a lasting stream end with UNAVAILABLE. A peer
    that drains or has left the list gets no new requests, unless there is no other. A peer that has left the list is
    removed once it has no requests.

    A subclass builds messages and reads them.
    """

    def __init__(
        self,
        name: str,
        discovery: Discovery,
        connect: Callable[[Listed], grpc.aio.Channel],
        recovery_timeout: float,
    ) -> None:
        """connect: makes channels to peers. name: for the log and for errors ("tokenizer service")."""
        self._name = name
        self._connect = connect
        self._recovery_timeout = recovery_timeout
        self._list = PeerList(discovery, self._make_peer)
        self.peers: list[Peer[Out, In]] = self._list.peers  # changes in place
        self._numbers = itertools.count(1)
        self._live: dict[int, R] = {}
        self._popularity = Popularity()
        self.used_at = time.monotonic()  # when a request came or ended
        self._idle = asyncio.Event()  # no request is live
        self._idle.set()
        self._away_since: float | None = time.monotonic()  # None = a peer is up
        self._has_been_up = False
        self.num_breaks = 0  # of streams that were up
        self._given_up = False
        self._is_patient = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def open(self, channel: grpc.aio.Channel) -> tuple[OpenCall[Out, In], Pings | None]:
        """Returns the call that starts the stream of a peer (`stub.Connect`), and the pings for it."""

    @abstractmethod
    def build_message(self, submits: list[Any], aborts: list[int]) -> Out:
        """Returns a message. submits: results of LinkedRequest.to_submit(); aborts: numbers."""

    @abstractmethod
    def on_response(self, message: In) -> None:
        """Passes outputs to their requests, with answered() and finish(). An exception breaks the stream."""

    def check_greeting(self, peer: Peer[Out, In], message: In) -> None:
        """Checks the first message of a stream. Raises RpcError if the peer must not be used now."""

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """True if a peer has sent a message on its present stream."""
        return self._away_since is None

    @property
    def is_available(self) -> bool:
        """True if requests can be served, now or after a short interruption; not before the first stream."""
        return self._has_been_up and not self._given_up

    @property
    def is_ready(self) -> bool:
        """True if requests would be served now: a peer is up and ready."""
        return any(peer.is_ready for peer in self.peers)

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set once `is_available` or `is_ready` may differ; get it before you read them."""
        return self._changed

    @property
    def num_live(self) -> int:
        return len(self._live)

    def set_patient(self, is_patient: bool) -> None:
        """Sets whether requests wait without end while all peers are away, as one of them will be started."""
        if is_patient is self._is_patient:
            return
        self._is_patient, self._given_up, self._has_been_up = is_patient, False, True
        if self._away_since is not None:
            self._away_since = time.monotonic()
            for request in self._live.values():
                request.lost_at = self._away_since
            self._watch()
        self._notify()

    async def drained(self) -> None:
        """Waits until no request is live."""
        await self._idle.wait()

    def choose(self, affinity: Affinity | None = None) -> Peer[Out, In] | None:
        """Returns the peer for a new request; None if no peer is up."""
        share = self._popularity.seen(affinity.beginning) if affinity else 0.0
        preferred = preferred_of(self.peers)
        return choose(preferred, affinity, share) if preferred else None

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: R) -> None:
        """Starts a request, or queues it while all peers are away.

        Raises RpcError UNAVAILABLE if they have been away for recovery_timeout seconds.
        """
        if self._given_up:
            raise self._unavailable()
        request.lost_at = self._away_since
        self.used_at = time.monotonic()
        self._idle.clear()
        self._place(request)

    def abort(self, request: R) -> None:
        """Ends a request without a result; does nothing if it has ended."""
        if request.number in self._live:
            self._leave(request)
            self._forget(request)

    def fail(self, request: R, error: RpcError) -> None:
        """Ends a request with an error, here and at the other side; does nothing if it has ended."""
        if request.number in self._live:
            self.abort(request)
            request.fail(error)

    def fail_all(self, error: RpcError) -> None:
        for request in list(self._live.values()):
            self.fail(request, error)

    def answered(self, number: int) -> R | None:
        """Returns the request of an output; None if it was aborted or moved in the meantime."""
        request = self._live.get(number)
        if request is not None:
            request.lost_at = None
        return request

    def finish(self, request: R) -> None:
        """Removes a request that the other side has ended."""
        if request.peer is not None:
            request.peer.num_requests -= 1
        self._forget(request)

    def _forget(self, request: R) -> None:
        request.peer = None
        del self._live[request.number]
        self.used_at = time.monotonic()
        self._list.on_progress()
        if not self._live:
            self._idle.set()

    def _place(self, request: R) -> None:
        """Submits a request to a peer; it waits while there is none."""
        self._live.pop(request.number, None)
        request.number = next(self._numbers)  # late outputs of its previous peer are ignored
        self._live[request.number] = request
        request.peer = self.choose(request.affinity)
        if request.peer is not None:
            request.peer.submit(request)

    def _leave(self, request: R) -> None:
        """Aborts a request at its peer."""
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
        """Moves the requests of a peer that is not ready to ready peers."""
        if peer.is_up and not peer.is_ready and self.is_ready:
            requests = [request for request in self._live.values() if request.peer is peer]
            for request in requests:
                self._leave(request)
            self._move(requests, time.monotonic())
            self._list.on_progress()

    def _move(self, requests: Sequence[R], now: float) -> None:
        """Moves requests to peers that are up; requests without a lasting stream for too long end."""
        for request in requests:
            if request.lost_at is not None and request.lost_at <= now - self._recovery_timeout:
                request.peer = None
                self.fail(request, self._unavailable())
            else:
                self._place(request)

    # -- the bound on recovery ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Clears lost_at of all requests: the streams last, and the requests merely wait for output."""
        for request in self._live.values():
            request.lost_at = None

    def _watch(self) -> None:
        """Sets the timer for the first request that will have waited too long while all peers are away."""
        assert self._away_since is not None
        if self._is_patient:
            self._stop_timer()
            return
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
        if late or (self._given_up and not self._list.has_starting):
            logger.error("%s; %d requests fail", self._unavailable().message, len(late))
        for request in late:
            self.fail(request, self._unavailable())

    def _unavailable(self) -> RpcError:
        if self._list.has_starting:
            return RpcError(grpc.StatusCode.UNAVAILABLE, f"the {self._name} is still starting; try again later")
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
