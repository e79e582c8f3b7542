"""The client side of one bidirectional stream, which reconnects."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

import grpc

from pagewire.wire.local.channel import LocalCall
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams.pings import Pings
from pagewire.wire.streams.stream_end import StreamEnd

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

Out = TypeVar("Out", covariant=True)
In = TypeVar("In", contravariant=True)
T = TypeVar("T")


class BidiCall(Protocol[In, Out]):
    """The part of grpc.aio.StreamStreamCall that a Link uses."""

    async def read(self) -> Out: ...
    async def write(self, request: In) -> None: ...
    def cancel(self) -> bool: ...


class OpenCall(Protocol[In, Out]):
    """Starts a call, such as `stub.Connect`."""

    def __call__(self, *, wait_for_ready: bool) -> BidiCall[In, Out]: ...


class LinkOwner(Protocol[Out, In]):
    """The user of a Link, which sends Out and receives In. All calls come one at a time, on the event loop."""

    async def on_connect(self, send: Callable[[Out], Awaitable[None]]) -> bool | None:
        """Handles a new stream; messages on earlier streams no longer count. May send at once.

        Returns True if the other side has answered, which proves that it is there; else its first message proves it.
        """

    def on_message(self, message: In) -> None:
        """Handles a message. An exception ends the stream, and a new one starts."""

    def on_disconnect(self, end: StreamEnd) -> None:
        """Handles the end of the stream, once for each on_connect; a new attempt follows."""


class Link(Generic[Request, Response]):
    """The client side of one multiplexed stream, which reconnects while `run()` runs."""

    def __init__(
        self,
        name: str,
        open_call: OpenCall[Request, Response],
        owner: LinkOwner[Request, Response],
        pings: Pings | None = None,
        on_ping: Callable[[], None] = lambda: None,
    ) -> None:
        """open_call: starts the call (`stub.Connect`). name: for the log ("scheduler"). pings: break the stream if the
        other side hangs. on_ping: is called when `pings.is_serving` may have changed."""
        self._name = name
        self._open_call = open_call
        self._owner = owner
        self._call: BidiCall[Request, Response] | None = None
        self._write_lock = asyncio.Lock()
        self._sending = set[asyncio.Task[None]]()
        self._pings, self._on_ping = pings, on_ping
        self._has_received = False
        self._why_broken: str | None = None  # by this side
        self._starts_over = False  # after start_over()

    async def send(self, message: Request) -> None:
        """Sends a message, in the order of the calls. Without a stream it is dropped: on_connect must send everything
        again."""
        await self._write(self._call, message)

    async def _write(self, call: BidiCall[Request, Response] | None, message: Request) -> None:
        async with self._write_lock:
            if call is None or call is not self._call:
                return
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                # The reader sees the same end of stream and reports it.
                logger.debug("write to %s failed: %s", self._name, error)
            except asyncio.CancelledError:
                # The reader may have ended the call during write(); then this task is not cancelled.
                if _is_cancelled():
                    raise
                logger.debug("write to %s failed: the stream has ended", self._name)

    def post(self, message: Request) -> None:
        """Sends a message like send(), without a wait for the other side: for few messages that it has not answered."""
        if not isinstance(self._call, LocalCall) or not self._call.post(message):
            self._sending.add(sending := asyncio.create_task(self._write(self._call, message)))
            sending.add_done_callback(self._sending.discard)

    def start_over(self, reason: str) -> None:
        """Breaks the stream, if there is one; a new one follows at once."""
        if self._call is not None:
            self._starts_over = True
            self._break_off(self._call, reason)

    async def run(self) -> None:
        """Connects and reconnects until cancelled."""
        backoff = FIRST_BACKOFF_S
        while True:
            was_up = await self._run_once()
            backoff = FIRST_BACKOFF_S if was_up else min(backoff * 2, MAX_BACKOFF_S)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _run_once(self) -> bool:
        """Runs one stream from its opening to its end, and returns whether the other side was there."""
        # Waiting for the connection, which gRPC attempts several times a second, finds a successor at once.
        call = self._open_call(wait_for_ready=True)
        self._call = call
        was_up = False
        end, self._why_broken = StreamEnd("stream ended", grpc.StatusCode.OK), None
        pinging: asyncio.Task[None] | None = None
        try:
            was_up = bool(await self._owner.on_connect(self.send))
            if _is_cancelled():
                raise asyncio.CancelledError
            message = await _in_a_task(call.read())
            if message is not grpc.aio.EOF:
                was_up = True
                if self._pings is not None:
                    pinging = asyncio.create_task(self._break_if_silent(call, self._pings), name=f"{self._name} pings")
                self._on_message(message)
                if isinstance(call, LocalCall):
                    await call.pass_to(self._on_message)
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._on_message(message)
        except grpc.aio.AioRpcError as error:
            end = StreamEnd.of(error)
        except asyncio.CancelledError:
            # A call that is cancelled during read() looks like a cancellation of this task.
            if _is_cancelled():
                raise
            end = StreamEnd(self._why_broken or "stream cancelled", starts_over=self._starts_over)
        except RpcError as error:
            was_up, end = False, StreamEnd.of(error)
        except Exception:
            logger.exception("protocol error on the stream to %s", self._name)
            end = StreamEnd("protocol error")
        finally:
            self._call = None
            call.cancel()
            if pinging is not None:
                pinging.cancel()
            self._owner.on_disconnect(end)
        starts_over, self._starts_over = self._starts_over, False
        if was_up and not starts_over:
            logger.warning("lost the stream to the %s (%s); reconnecting", self._name, end.text)
        else:
            logger.debug("no stream to the %s now (%s)", self._name, end.text)
        return was_up

    def _on_message(self, message: Response) -> None:
        self._has_received = True
        self._owner.on_message(message)

    async def _break_if_silent(self, call: BidiCall[Request, Response], pings: Pings) -> None:
        self._break_off(call, await pings.until_silent(self._take_received, self._on_ping))

    def _break_off(self, call: BidiCall[Request, Response], reason: str) -> None:
        self._why_broken = reason
        call.cancel()

    def _take_received(self) -> bool:
        has_received, self._has_received = self._has_received, False
        return has_received


def _is_cancelled() -> bool:
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


async def _in_a_task(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which runs in a separate task.

    While a call is being made, gRPC may swallow the cancellation of the task that waits for it. A task that waits for
    another task is always cancelled; the caller then cancels the call, which ends the other task.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the result is no longer needed
        raise
    return task.result()
