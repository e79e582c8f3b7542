"""The client side of a multiplexed stream that loses no request when it breaks."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

from pagewire.rpc import RpcError
from pagewire.streams.link import MAX_BACKOFF_S, Link, OpenCall
from pagewire.streams.pings import Pings

logger = logging.getLogger(__name__)

# Requests that share one message; far below what gRPC takes.
MAX_SEND_BYTES = 16 * 1024 * 1024
# Seconds after which a new stream is taken to last. A service that dies again and again as it gets the same requests
# lives shorter, and these must not come back for ever.
SETTLED_S = 2 * MAX_BACKOFF_S


class LinkedRequest(ABC):
    """One request, with what it takes to go on after a break."""

    __slots__ = ("lost_at", "number", "was_sent")

    def __init__(self) -> None:
        self.number = 0  # unique on the link; 0 = not submitted
        self.was_sent = False  # the other side may have let it in
        # time.monotonic() when the stream broke under it, until there is output again.
        self.lost_at: float | None = None

    @abstractmethod
    def to_submit(self) -> Any:
        """The protobuf message that starts it or, if was_sent, has it go on after the output received so far."""

    @abstractmethod
    def fail(self, error: RpcError) -> None:
        """It has ended with an error."""


R = TypeVar("R", bound=LinkedRequest)
Out = TypeVar("Out")
In = TypeVar("In")


class ResubmittingLink(ABC, Generic[R, Out, In]):
    """Carries requests until they end, over one stream after another.

    The other side speaks first on every stream, and nothing is sent before: what was sent has arrived, unless the
    stream broke just then. After a break, every live request is submitted again; those that have waited for
    recovery_timeout seconds, without a stream that lasts, end with UNAVAILABLE.

    A subclass builds the messages and reads them.
    """

    def __init__(
        self, name: str, open_call: OpenCall[Out, In], recovery_timeout: float, pings: Pings | None = None
    ) -> None:
        """open_call starts the call (`stub.Connect`); name is for the log and for errors ("tokenizer service"). pings:
        have a hang count as a death."""
        self._name = name
        self._recovery_timeout = recovery_timeout
        self._link: Link[Out, In] = Link(name, open_call, self, pings, self._notify)
        self._pings = pings
        self._numbers = itertools.count(1)
        self._live: dict[int, R] = {}
        self._unsent: dict[int, R] = {}  # those of the live ones that this stream has not carried
        self._aborts: list[int] = []
        self._wake = asyncio.Event()  # there may be something to send
        self._idle = asyncio.Event()  # no request is live
        self._idle.set()
        self._away_since: float | None = time.monotonic()  # None = the stream is up
        self._has_been_up = False
        self.num_breaks = 0  # of streams that were up
        self._given_up = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def build_message(self, submits: list[Any], aborts: list[int]) -> Out:
        """submits: what LinkedRequest.to_submit() returned; aborts: numbers."""

    @abstractmethod
    def on_response(self, message: In) -> None:
        """Hands outputs to their requests: see answered() and finish(). An exception here breaks the stream."""

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the other side has spoken on the present stream."""
        return self._away_since is None

    @property
    def is_available(self) -> bool:
        """Whether requests can be served, now or after a short interruption; not before the first stream."""
        return self._has_been_up and not self._given_up

    @property
    def is_ready(self) -> bool:
        """Whether requests would be served now: the other side is there, and says that it is ready."""
        return self.is_up and (self._pings is None or self._pings.is_serving)

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

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: R) -> None:
        """Starts a request, or queues it while the other side is away.

        Raises RpcError UNAVAILABLE if that has been for recovery_timeout seconds.
        """
        if self._given_up:
            raise self._unavailable()
        request.number = next(self._numbers)
        request.lost_at = self._away_since
        self._live[request.number] = self._unsent[request.number] = request
        self._idle.clear()
        self._wake.set()

    def abort(self, request: R) -> None:
        """Ends a request of which nobody wants to hear any more; does nothing if it has ended."""
        if request.number in self._live:
            self.finish(request)
            if self._unsent.pop(request.number, None) is None:
                self._aborts.append(request.number)
                self._wake.set()

    def fail(self, request: R, error: RpcError) -> None:
        """Ends a request with an error, here and at the other side; does nothing if it has ended."""
        if request.number in self._live:
            self.abort(request)
            request.fail(error)

    def fail_all(self, code: grpc.StatusCode, message: str) -> None:
        for request in list(self._live.values()):
            self.fail(request, RpcError(code, message))

    def answered(self, number: int) -> R | None:
        """The request for which output has arrived; None if it was aborted and this was on its way."""
        request = self._live.get(number)
        if request is not None:
            request.lost_at = None
        return request

    def finish(self, request: R) -> None:
        """Lets go of a request that the other side has ended."""
        del self._live[request.number]
        if not self._live:
            self._idle.set()

    # -- the stream --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the stream up and sends, until cancelled."""
        self._watch()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run(), name=f"{self._name} link")
                tasks.create_task(self._send_all(), name=f"{self._name} sender")
        finally:
            self._stop_timer()

    async def _send_all(self) -> None:
        """The only sender: whatever is unsent goes out together."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.is_up and (self._unsent or self._aborts):
                # Nothing happens between these two: what was taken goes out on this stream or, if it breaks, is taken
                # again for the next.
                message = self._take_message()
                await self._link.send(message)

    def _take_message(self) -> Out:
        aborts, self._aborts = self._aborts, []
        submits: list[Any] = []
        size = 0
        while self._unsent and size < MAX_SEND_BYTES:
            request = self._unsent.pop(next(iter(self._unsent)))
            submits.append(request.to_submit())
            request.was_sent = True
            size += submits[-1].ByteSize()
        return self.build_message(submits, aborts)

    async def on_connect(self, send: Callable[[Out], Awaitable[None]]) -> None:
        # What was aborted is unknown to this stream.
        self._aborts.clear()
        self._unsent = dict(self._live)

    def on_message(self, message: In) -> None:
        if self._away_since is not None:
            self._away_since = None
            self._has_been_up = True
            self._given_up = False
            self._start_timer(SETTLED_S, self._settle)
            self._wake.set()
            self._notify()
        self.on_response(message)

    def on_disconnect(self, reason: str) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            self.num_breaks += 1
            for request in self._live.values():
                if request.lost_at is None:
                    request.lost_at = self._away_since
            self._watch()
            self._notify()

    # -- the bound on recovery ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The stream lasts: it is not lost any more who merely waits for output."""
        for request in self._live.values():
            request.lost_at = None

    def _watch(self) -> None:
        """Has the first end that has waited too long while the other side is away."""
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
