"""The server side: the handlers of gRPC, served to neighbours on this machine."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import grpc
from google.rpc.status_pb2 import Status

from pagewire.wire.local import unix_sockets
from pagewire.wire.local.pipe import END, MESSAGE, REFUSED, STATUS, Frame, Pipe, ThreadWriter
from pagewire.wire.status import error_details
from pagewire.wire.status.rpc_error import RpcError

logger = logging.getLogger(__name__)

_BACKLOG = 128
_OPENING_SECONDS = 15.0  # for the name of a connection's method to arrive
_NO_METADATA: tuple[()] = ()  # a connection carries none


class _Details(NamedTuple):
    method: str
    invocation_metadata: tuple[()] = _NO_METADATA


class LocalServer:
    """Serves the methods with two streams of the servicers that are added to it, as to a gRPC server.

    While a handler leaves 4 MiB of a client unread, it learns of the client's end only when it reads on or writes; that
    cancels it. Every handler reads in a task of its own, whatever else it waits for, so that none is held for long.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], max_bytes: int) -> None:
        """interceptors: as for gRPC, the outermost first: it turns the exceptions of handlers into statuses. max_bytes:
        of a message."""
        self._find: Callable[[Any], Any] = self._registered
        for interceptor in reversed(interceptors):
            self._find = partial(interceptor.intercept_service, self._find)
        self._max_bytes = max_bytes
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        self._servers: list[asyncio.Server] = []
        self._paths: list[Path] = []
        self._calls: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignores handlers without names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        for name, handler in handlers.items():
            if handler.request_streaming and handler.response_streaming:
                self._handlers[f"/{service}/{name}"] = handler

    async def listen(self, address: str) -> None:
        """Listens beside a gRPC address, to which this process is about to bind, if it is a unix socket."""
        if not self._handlers or (path := unix_sockets.stream_path(address)) is None:
            return
        try:
            listener = _bound(path)
        except OSError as error:  # for instance because the path is too long
            logger.warning("streams to %s use gRPC, which costs more, as %s cannot be bound: %s", address, path, error)
            return
        self._paths.append(Path(path))
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_unix_server(self._accept, sock=listener, backlog=_BACKLOG))

    async def stop(self) -> None:
        """Cuts off all calls, and listens no longer."""
        for path in self._paths:
            unix_sockets.remove(path)
        for server in self._servers:
            server.close()
        self._paths, self._servers = [], []
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    def _accept(self) -> Pipe:
        connection = _Connection(self._max_bytes)
        connection.serving = task = asyncio.create_task(self._serve(connection), name="local stream")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return connection

    async def _serve(self, connection: "_Connection") -> None:
        context = _Context(connection)
        try:
            if (opening := await _opening(connection)) is None:
                return
            with suppress(grpc.aio.AbortError):
                handler = await self._find(_Details(await _method(opening, self._handlers, context)))
                context.serialize = handler.response_serializer
                await handler.stream_stream(_requests(connection, handler.request_deserializer), context)
                await connection.write(STATUS, b"")
        finally:
            connection.close()
            context.done()

    async def _registered(self, details: _Details) -> grpc.RpcMethodHandler:
        return self._handlers[details.method]


def _bound(path: str) -> socket.socket:
    """Returns a socket at a path, where that of a killed process may be. Raises OSError, also if a file is there."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        unix_sockets.remove(Path(path))
        with unix_sockets.private():
            listener.bind(path)
    except OSError:
        listener.close()
        raise
    return listener


class _Connection(Pipe):
    """The server's end of a connection."""

    serving: asyncio.Task[None] | None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._frames.clear()  # they are read no more, and the garbage collector comes late
        if self.serving is not None:
            self.serving.cancel()
            self.serving = None


async def _opening(connection: Pipe) -> Frame | None:
    """Returns the first frame; None if the connection ends before it, or it does not arrive in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_OPENING_SECONDS):
            return await connection.read()
    return None


async def _method(opening: Frame, known: Container[str], context: "_Context") -> str:
    """Returns the name of the method that the first frame opens; ends the call if there is none."""
    if opening.kind == REFUSED:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, Status.FromString(opening.data).message)
    if opening.kind != MESSAGE:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the first frame has the kind {opening.kind}")
    if (method := opening.data.decode(errors="replace")) not in known:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method!r:.100}")
    return method


async def _requests(connection: Pipe, deserialize: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    while (frame := await connection.read()) is not None:
        if frame.kind == END:
            return
        if frame.kind == REFUSED:
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, Status.FromString(frame.data).message)
        if frame.kind != MESSAGE:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"a client sends no frames of kind {frame.kind}")
        yield deserialize(frame.data)
    await asyncio.Event().wait()  # the call is being cancelled


class _Context:
    """The part of a grpc.aio.ServicerContext that handlers of streams use."""

    def __init__(self, connection: Pipe) -> None:
        self._connection = connection
        self._on_done: list[Callable[[Any], None]] = []
        self._writer: ThreadWriter | None = None
        self.serialize: Callable[[Any], bytes]

    async def write(self, message: Any) -> None:
        await self._connection.write(MESSAGE, self.serialize(message))

    def thread_writer(self) -> ThreadWriter:
        """Returns a writer for other threads, which ends with the call."""
        if self._writer is None:
            self._writer = ThreadWriter(self._connection, self.serialize)
        return self._writer

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        status = dict(trailing_metadata).get(error_details.KEY)
        await self._connection.write(STATUS, status or Status(code=code.value[0], message=details).SerializeToString())
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> tuple[()]:
        return _NO_METADATA

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._on_done.append(callback)

    def done(self) -> None:
        """Calls the callbacks, at the end of the call."""
        if self._writer is not None:
            self._writer.close()
        for callback in self._on_done:
            callback(self)
