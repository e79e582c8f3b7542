"""The client side: a channel whose calls with two streams avoid gRPC where the server allows it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

import grpc
from google.rpc.status_pb2 import Status

from pagewire.wire.local.pipe import END, MESSAGE, Pipe
from pagewire.wire.status import error_details

_OK = grpc.StatusCode.OK.value[0]
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_PREFIX = "/pagewire."


class LocalChannel:
    """A channel to a unix socket. It is that of gRPC, except for our methods with two streams."""

    def __init__(self, channel: grpc.aio.Channel, path: str, max_bytes: int) -> None:
        """path: of the socket for streams. max_bytes: of a message."""
        self._channel = channel
        self._path = path
        self._max_bytes = max_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.close()

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
            if requests or options:  # of which only gRPC knows
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

            return LocalCall(connect(), request_serializer, response_deserializer)

        return call


class LocalCall:
    """A call with two streams, like grpc.aio.StreamStreamCall."""

    def __init__(
        self,
        connect: Coroutine[Any, Any, Any],
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> None:
        """connect: returns a Pipe, or the call of gRPC that does the work instead."""
        self._connecting = asyncio.create_task(connect, name="local stream")
        self._serialize, self._deserialize = serialize, deserialize
        self._pipe: Pipe | None = None
        self._other: Any = None
        self._end: grpc.aio.AioRpcError | None = None  # also of a call that ended well

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
        if self._end is None:
            frame = await pipe.read()
            if frame is not None and frame.kind == MESSAGE:
                return self._deserialize(frame.data)
            self._end = _end_of(None if frame is None else frame.data)
            pipe.close()
        if self._end.code() is not grpc.StatusCode.OK:
            raise self._end
        return grpc.aio.EOF

    async def write(self, request: Any) -> None:
        """Sends a message, and waits while the server does not keep up. Raises grpc.aio.AioRpcError."""
        if (pipe := self._pipe or await self._open()) is None:
            await self._other.write(request)
            return
        if self._end is not None or pipe.is_lost:
            raise self._end or _end_of(None)
        await pipe.write(MESSAGE, self._serialize(request))

    async def done_writing(self) -> None:
        """Tells the server that no message follows."""
        if (pipe := await self._open()) is None:
            await self._other.done_writing()
        else:
            await pipe.write(END, b"")

    def cancel(self) -> bool:
        """Breaks the call; a read() that waits raises CancelledError. Returns False if it has ended."""
        if self._other is not None:
            return bool(self._other.cancel())
        if self._end is not None:
            return False
        if not self._connecting.done():
            self._connecting.cancel()
        elif not self._connecting.cancelled() and self._connecting.exception() is None:
            opened = self._connecting.result()
            if isinstance(opened, Pipe):
                opened.interrupt()
            else:
                opened.cancel()
        return True

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


def _end_of(status_bytes: bytes | None) -> grpc.aio.AioRpcError:
    """Returns the end of a call. status_bytes: of the server; None: the connection broke."""
    nothing = grpc.aio.Metadata()
    if status_bytes is None:
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the connection ended")
    status = Status.FromString(status_bytes)
    trailers = grpc.aio.Metadata((error_details.KEY, status_bytes)) if status.details else nothing
    return grpc.aio.AioRpcError(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), nothing, trailers, status.message)
