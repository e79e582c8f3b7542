"""One of several services that do the same work, and the stream to it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from pagewire.wire.discovery.listed import Listed
from pagewire.wire.streams.link import Link, OpenCall
from pagewire.wire.streams.pings import Pings
from pagewire.wire.streams.stream_end import StreamEnd

logger = logging.getLogger(__name__)


class Response(Protocol):
    """A message of the other side."""

    @property
    def draining(self) -> bool:
        """True if the sender drains."""


Out = TypeVar("Out")
In = TypeVar("In", bound=Response)


class PeerOwner(Protocol):
    """The owner of the requests. Calls come one at a time."""

    def check_greeting(self, peer: Any, message: Any) -> None:
        """Checks the first message of a stream. Raises RpcError if the peer must not be used."""

    def on_up(self, peer: Any) -> None:
        """Handles the first message of a stream."""

    def on_response(self, message: Any) -> None: ...

    def on_down(self, peer: Any) -> None:
        """Handles the end of a stream on which the peer had sent a message."""

    def on_ping(self, peer: Any) -> None:
        """Handles a possible change of readiness."""

    def take_message(self, peer: Any) -> Any:
        """Returns the next message to the peer, from its `unsent` requests and `aborts`; there are some."""


class Peer(Generic[Out, In]):
    """One service, and the stream to it.

    The other side sends the first message on every stream, and nothing is sent to it before: a message that was sent
    has arrived, unless the stream broke just then.
    """

    def __init__(
        self,
        name: str,
        listed: Listed,
        channel: grpc.aio.Channel,
        open_call: OpenCall[Out, In],
        pings: Pings | None,
        owner: PeerOwner,
    ) -> None:
        """name: for the log. open_call: starts the stream on the channel. pings: a hang then counts as a death."""
        self.listed = listed
        self.channel = channel
        self.is_listed = True
        self.is_up = False  # it has sent a message on the present stream
        self._has_been_up = False
        self.is_draining = False  # and its last greeting says so
        self.unsent: dict[int, Any] = {}  # requests that were not sent yet, by number
        self.aborts: list[int] = []
        self.num_requests = 0  # at this peer
        self.num_calls = 0  # other unary calls and streams
        self.last_choice = 0  # for balancing
        self._owner = owner
        self._pings = pings
        self._link: Link[Out, In] = Link(name, open_call, self, pings, self._on_ping)
        self._wake = asyncio.Event()  # there may be something to send

    @property
    def address(self) -> str:
        return self.listed.address

    @property
    def is_ready(self) -> bool:
        """True if requests would be served now: the peer is up, and its health service reports readiness."""
        return self.is_up and (self._pings is None or self._pings.is_serving)

    @property
    def is_starting(self) -> bool:
        """True if the other side accepts connections, but has not been up yet."""
        return not self._has_been_up and self.channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def load(self) -> int:
        return self.num_requests + self.num_calls

    def submit(self, request: Any) -> None:
        """Queues a request to be sent soon."""
        self.unsent[request.number] = request
        self.num_requests += 1
        self._wake.set()

    def abort(self, number: int) -> None:
        """Removes a request, and queues its abort if it was sent already."""
        self.num_requests -= 1
        if self.unsent.pop(number, None) is None:
            self.aborts.append(number)
            self._wake.set()

    async def run(self) -> None:
        """Keeps the stream up and sends, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._link.run(), name=f"link to {self.address}")
            tasks.create_task(self._send_all(), name=f"sender to {self.address}")

    async def _send_all(self) -> None:
        """Sends everything unsent together; it is the only sender."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.is_up and (self.unsent or self.aborts):
                # No other code runs between these two lines: a taken request is sent on this stream or, if the stream
                # breaks, placed again.
                message = self._owner.take_message(self)
                await self._link.send(message)

    # -- what Link calls ---------------------------------------------------------------------------------------------

    async def on_connect(self, send: Callable[[Out], Awaitable[None]]) -> None:
        pass

    def on_message(self, message: In) -> None:
        if not self.is_up:
            self._owner.check_greeting(self, message)
            self.is_up = self._has_been_up = True
            self._owner.on_up(self)
        if message.draining and not self.is_draining:
            self.is_draining = True
            logger.info("%s drains; new requests go to other peers, if there are any", self.address)
        self._owner.on_response(message)

    def on_disconnect(self, end: StreamEnd) -> None:
        if self.is_up:
            self.is_up = self.is_draining = False
            self.unsent.clear()
            self.aborts.clear()
            self.num_requests = 0
            self._owner.on_down(self)

    def _on_ping(self) -> None:
        self._owner.on_ping(self)
