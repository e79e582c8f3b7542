"""One end of a connection that carries one call in frames."""

import asyncio
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import grpc
from google.rpc.status_pb2 import Status

# Kinds of frames.
MESSAGE = 0
END = 1  # the client sends no more messages
STATUS = 2  # the last frame of the server: google.rpc.Status
REFUSED = -1  # of no frame that is sent: google.rpc.Status of one that was too long

_HEAD = struct.Struct("<IB")
# Unread bytes from which on nothing more is read.
_MAX_UNREAD = 4 * 1024 * 1024
# Linux keeps what is written to a unix socket at once in one buffer, of up to some 36 KB: it takes a frame of this size
# whole or not at all.
_MAX_WHOLE = 16 * 1024


class Frame(NamedTuple):
    kind: int
    data: bytes


def frame(kind: int, data: bytes) -> bytes:
    """Returns a frame as it is sent."""
    return _HEAD.pack(len(data), kind) + data


class Pipe(asyncio.Protocol):
    """Sends frames, and keeps received ones until they are read."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of a message; a longer one is replaced by a frame REFUSED, after which nothing is read."""
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()
        self._frames: deque[Frame] = deque()
        self._num_unread = 0  # bytes
        self._arrival = asyncio.Event()  # of a frame, or of the end
        self._writable = asyncio.Event()
        self._writable.set()
        self._has_refused = False
        self._handle: Callable[[bytes], None] | None = None
        self.is_lost = False

    async def read(self) -> Frame | None:
        """Returns the next frame; None once the connection has ended."""
        while not self._frames:
            if self.is_lost:
                return None
            await self.wait()
        first = self._frames.popleft()
        was_paused, self._num_unread = self._num_unread > _MAX_UNREAD, self._num_unread - len(first.data)
        is_resumed = was_paused and self._num_unread <= _MAX_UNREAD and not self._has_refused
        if is_resumed and self._transport is not None and not self.is_lost:
            self._transport.resume_reading()
        return first

    async def pass_to(self, handle: Callable[[bytes], None]) -> None:
        """Calls `handle` with each message as it arrives, which costs less than waking a task for it. Returns when
        another frame can be read, or the connection has ended."""
        while self._frames and self._frames[0].kind == MESSAGE:
            if (frame := await self.read()) is not None:
                handle(frame.data)
        self._handle = handle
        await self.wait()

    async def wait(self) -> None:
        """Returns when there is a frame to read, or the connection has ended."""
        while not self._frames and not self.is_lost:
            self._arrival.clear()
            await self._arrival.wait()

    async def write(self, kind: int, data: bytes) -> None:
        """Sends a frame, and waits while the other side does not keep up. Does nothing after the end."""
        self.post(kind, data)
        if not self._writable.is_set():
            await self._writable.wait()

    def post(self, kind: int, data: bytes) -> None:
        """Sends a frame without a wait. Does nothing after the end."""
        if self._transport is not None and not self.is_lost:
            self._transport.write(frame(kind, data))

    def duplicate(self) -> socket.socket | None:
        """Returns another socket of the connection, for the caller to close; None after the end."""
        if self._transport is None or self.is_lost:
            return None
        duplicate = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        duplicate.setblocking(False)
        return duplicate

    @property
    def num_unwritten(self) -> int:
        """Bytes that the event loop has still to write. Read on any thread."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def cancel(self) -> None:
        """Breaks the connection; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Ends the connection after what was sent."""
        if self._transport is not None:
            self._transport.close()

    # -- what the event loop calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._has_refused:
            return
        partial, start = self._partial, 0
        if not partial and len(data) >= _HEAD.size:  # mostly, one frame arrives at a time
            size, kind = _HEAD.unpack_from(data)
            if len(data) == _HEAD.size + size <= _HEAD.size + self._max_bytes:
                self._add(kind, data[_HEAD.size :])
                return
        partial += data
        while len(partial) >= start + _HEAD.size:
            size, kind = _HEAD.unpack_from(partial, start)
            if size > self._max_bytes:
                self._refuse(size)
                return
            start += _HEAD.size
            if len(partial) < start + size:
                start -= _HEAD.size
                break
            self._add(kind, bytes(partial[start : start + size]))
            start += size
        del partial[:start]

    def _add(self, kind: int, data: bytes) -> None:
        if self._handle is not None and kind == MESSAGE:
            self._handle(data)
            return
        self._frames.append(Frame(kind, data))
        was_paused, self._num_unread = self._num_unread > _MAX_UNREAD, self._num_unread + len(data)
        if self._num_unread > _MAX_UNREAD and not was_paused and self._transport is not None:
            self._transport.pause_reading()
        self._arrival.set()

    def _refuse(self, size: int) -> None:
        message = f"a message has {size} bytes; up to {self._max_bytes} are accepted"
        status = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message=message)
        self._has_refused = True
        self._partial = bytearray()
        self._add(REFUSED, status.SerializeToString())
        if self._transport is not None:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._partial = bytearray()
        self._writable.set()
        self._arrival.set()


class ThreadWriter:
    """Writes messages of one call to its socket from any thread, without the event loop.

    A thread that computes thus needs no other thread of its process to deliver a result. To wake the event loop would
    cost more than the write, and while that loop holds the interpreter, it may lose its core to the very process that
    the result has woken.
    """

    def __init__(self, pipe: Pipe, serialize: Callable[[Any], bytes]) -> None:
        self._pipe = pipe
        self._serialize = serialize
        self._lock = threading.Lock()
        # Of its own: the event loop may close its own at any time, after which the number is that of another file.
        self._socket = pipe.duplicate()

    def try_write(self, message: Any) -> bool:
        """Writes a message at once. Returns False, having written nothing, if that is not possible: the socket is full,
        the message is large, or the event loop has not written all that was before it."""
        data = frame(MESSAGE, self._serialize(message))
        if len(data) > _MAX_WHOLE or self._pipe.num_unwritten:
            return False
        with self._lock:
            if self._socket is None:
                return False
            try:
                if self._socket.send(data) < len(data):
                    self._socket.shutdown(socket.SHUT_RDWR)  # the rest would have to come before all others
            except BlockingIOError:
                return False
            except OSError:
                pass  # the connection has ended, as the event loop finds out itself
            return True

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def thread_writer(context: grpc.aio.ServicerContext) -> ThreadWriter | None:
    """Returns the writer of a call, which ends with it; None if gRPC serves the call."""
    make: Callable[[], ThreadWriter] | None = getattr(context, "thread_writer", None)
    return None if make is None else make()
