"""The client side: a channel on which calls with two streams avoid gRPC where the server allows it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self
from weakref import WeakSet

import grpc
from google.rpc.status_pb2 import Status

from pagewire.wire.local.pipe import END, MESSAGE, Pipe
from pagewire.wire.status import error_details

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_PREFIX = "/pagewire."


class LocalChannel:
    """A channel to a unix socket. It is that of gRPC, except for our methods with two streams."""

    def __init__(self, channel: grpc.aio.Channel, path: str, max_bytes: int) -> None:
        """path: of the socket for streams. max_bytes: of a message."""
        self._channel = channel
        self._path = path
        self._max_bytes = max_bytes
        self._calls = WeakSet[LocalCall]()
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancels our calls with two streams, and closes. grace: seconds for the other calls to end by themselves."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()
        await self._channel.close(grace)

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] = bytes,
        response_deserializer: Callable[[bytes], Any] = bytes,
        **more: Any,
    ) -> Any:
        over_grpc = self._channel.stream_stream(method, request_serializer, response_deserializer, **more)
        if not method.startswith(_PREFIX):
            return over_grpc

        def call(*requests: Any, wait_for_ready: bool = False, **options: Any) -> Any:
            if requests or options or self._is_closed:  # only gRPC supports these, and refuses a call after close()
                return over_grpc(*requests, wait_for_ready=wait_for_ready, **options)

            async def connect() -> Any:
                if wait_for_ready:
                    # gRPC's own attempts find a server that starts; the other socket is there before it.
                    await self._channel.channel_ready()
                try:
                    _, pipe = await asyncio.get_running_loop().create_unix_connection(
                        lambda: Pipe(self._max_bytes), self._path
                    )
                except OSError:
                    # It does not serve streams here, or it has just ended: then this call must not wait for its
                    # successor, which the next one reaches without gRPC.
                    return over_grpc(wait_for_ready=False)
                await pipe.write(MESSAGE, method.encode())
                return pipe

            connecting = asyncio.create_task(connect(), name="local stream")
            local = LocalCall(connecting, request_serializer, response_deserializer)
            self._calls.add(local)
            return local

        return call


class LocalCall:
    """A call with two streams, like grpc.aio.StreamStreamCall."""

    def __init__(
        self,
        connecting: asyncio.Task[Any],
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> None:
        """connecting: returns a Pipe, or the call of gRPC that does the work instead."""
        self._connecting = connecting
        self._serialize, self._deserialize = serialize, deserialize
        self._pipe: Pipe | None = None
        self._other: Any = None
        self._end: grpc.aio.AioRpcError | None = None  # also of a call that ended well
        self._is_cancelled = False

    def __del__(self) -> None:
        # A call that is dropped is cancelled, as in gRPC; the collector that finds it may run in any thread.
        loop = self._connecting.get_loop()
        if self._end is None and not self._is_cancelled and not loop.is_closed():
            loop.call_soon_threadsafe(_break_off, self._connecting)

    async def _open(self) -> Pipe | None:
        """Waits for the connection; returns None if gRPC has the call."""
        if self._pipe is None and self._other is None:
            opened = await asyncio.shield(self._connecting)
            self._pipe, self._other = (opened, None) if isinstance(opened, Pipe) else (None, opened)
        return self._pipe

    async def code(self) -> grpc.StatusCode:
        """Returns the status of a call that was read to its end."""
        if self._other is not None:
            code: grpc.StatusCode = await self._other.code()
            return code
        assert self._end is not None
        return self._end.code()

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Waits for the server's first message or its end; there is no metadata."""
        if (pipe := await self._open()) is None:
            metadata: grpc.aio.Metadata = await self._other.initial_metadata()
            return metadata
        await pipe.wait()
        return grpc.aio.Metadata()

    async def read(self) -> Any:
        """Returns the next message, or grpc.aio.EOF. Raises grpc.aio.AioRpcError, or CancelledError after cancel()."""
        if (pipe := self._pipe or await self._open()) is None:
            return await self._other.read()
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._end is None:
            frame = await pipe.read()
            if self._is_cancelled:
                raise asyncio.CancelledError
            if frame is not None and frame.kind == MESSAGE:
                return self._deserialize(frame.data)
            self._end = _end_of(None if frame is None else frame.data)
            pipe.close()
        if self._end.code() is not grpc.StatusCode.OK:
            raise self._end
        return grpc.aio.EOF

    async def pass_to(self, handle: Callable[[Any], None]) -> None:
        """Calls `handle` with each message as it arrives, until read() returns the end; if it raises, the call is
        cancelled. Returns at once if gRPC has the call."""
        if (pipe := self._pipe or await self._open()) is None:
            return
        failures: list[Exception] = []

        def receive(data: bytes) -> None:
            if not self._is_cancelled:
                try:
                    handle(self._deserialize(data))
                except Exception as error:
                    failures.append(error)
                    self.cancel()

        await pipe.pass_to(receive)
        for failure in failures:
            raise failure

    def post(self, request: Any) -> bool:
        """Sends a message without a wait, or drops it after the end. Returns False if only write() can send it."""
        if self._pipe is not None and self._end is None and not self._is_cancelled:
            self._pipe.post(MESSAGE, self._serialize(request))
        return self._pipe is not None

    async def write(self, request: Any) -> None:
        """Sends a message, and waits while the server does not keep up. Raises InvalidStateError after the end;
        its status comes from read()."""
        if (pipe := self._pipe or await self._open()) is None:
            await self._other.write(request)
            return
        if self._end is not None or self._is_cancelled or pipe.is_lost:
            raise asyncio.InvalidStateError("the stream has ended")
        await pipe.write(MESSAGE, self._serialize(request))

    async def done_writing(self) -> None:
        """Tells the server that no message follows."""
        if (pipe := await self._open()) is None:
            await self._other.done_writing()
        else:
            await pipe.write(END, b"")

    def cancel(self) -> bool:
        """Breaks the call; every read() raises CancelledError from now on. Returns False if it has ended."""
        if self._other is not None:
            return bool(self._other.cancel())
        if self._end is not None or self._is_cancelled:
            return False
        self._is_cancelled = True
        _break_off(self._connecting)
        return True

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


def _break_off(connecting: asyncio.Task[Any]) -> None:
    """Cancels what a task opens, or has opened."""
    if not connecting.done():
        connecting.cancel()
    elif not connecting.cancelled() and connecting.exception() is None:
        connecting.result().cancel()


def _end_of(status_bytes: bytes | None) -> grpc.aio.AioRpcError:
    """Returns the end of a call. status_bytes: of the server; None: the connection broke."""
    nothing = grpc.aio.Metadata()
    if status_bytes is None:
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the connection ended")
    status = Status.FromString(status_bytes)
    trailers = grpc.aio.Metadata((error_details.KEY, status_bytes)) if status.details else nothing
    return grpc.aio.AioRpcError(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), nothing, trailers, status.message)
