"""The REST port with TLS. Connections in their handshake are bounded like all others (`connections.py`)."""

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any

import uvicorn

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.request_context import NO_CERTIFICATE
from pagewire.gateway.http.connections import Connections, Phase
from pagewire.gateway.http.http_connection import Connection, response
from pagewire.wire.secure_rpc import ServiceTls

logger = logging.getLogger(__name__)

_HANDSHAKE = b"\x16"  # the first byte of TLS
_NO_DESCRIPTORS_S = 1.0
_WRITE_BUFFER = 64 * 1024  # as of connections without TLS


class Handshake:
    """A connection before the end of its TLS handshake."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.phase = Phase.HANDSHAKE
        self.over_limit = False
        self.is_over = False
        self.is_the_loops = False  # the event loop closes the socket
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._end)

    def give_up(self, error: ApiError | None = None) -> None:
        """Closes the connection; before the handshake, no error can be sent."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._end()

    def _end(self, task: object = None) -> None:
        self.is_over = True
        if not self.is_the_loops:
            self.sock.close()


class SecureConnection(Connection):
    """A connection after its TLS handshake."""

    def __init__(
        self, handshake: Handshake, connections: Connections, *, wants_certificate: bool, **uvicorns: Any
    ) -> None:
        super().__init__(connections, **uvicorns)
        self._handshake = handshake
        self._wants_certificate = wants_certificate

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connections.remove(self._handshake)
        transport.set_write_buffer_limits(_WRITE_BUFFER)
        self._wants_certificate &= not transport.get_extra_info("peercert")
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._wants_certificate:
            self.scope[NO_CERTIFICATE] = True  # type: ignore[literal-required]


class TlsListener:
    """Accepts connections and does their TLS handshakes; a client that speaks plain HTTP gets an error.

    uvicorn uses it as one of its servers.
    """

    def __init__(self, tls: ServiceTls, connections: Connections, sock: socket.socket, server: uvicorn.Server) -> None:
        """Starts at once. sock: stays open after close()."""
        assert tls.certificates is not None
        sock.setblocking(False)
        self._sock = sock
        self._certificates = tls.certificates
        self._wants_certificate = tls.wants_certificates
        self._connections = connections
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Stops accepting connections and ends handshakes."""
        self.stop_accepting()
        self._connections.end_handshakes()

    def stop_accepting(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)

    async def wait_closed(self) -> None:
        """Returns at once: uvicorn calls it, and nothing lasts after close()."""

    def take(self, accepted: socket.socket) -> None:
        """Begins the handshake of a connection."""
        accepted.setblocking(False)
        handshake = Handshake(accepted)
        self._connections.add(handshake)
        if not handshake.is_over:
            handshake.begin(self._open(handshake))

    def _accept(self) -> None:
        try:
            accepted, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # its client is gone
        except OSError as error:
            logger.error("a connection cannot be accepted: %s", error)
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(_NO_DESCRIPTORS_S, self._loop.add_reader, self._sock, self._accept)
            return
        self.take(accepted)

    async def _open(self, handshake: Handshake) -> None:
        limits = self._connections.limits
        try:
            if await self._speaks_tls(handshake.sock):
                handshake.is_the_loops = True
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._protocol(handshake),
                    handshake.sock,
                    ssl=self._certificates.current().context,
                    ssl_handshake_timeout=2 * limits.head_s,  # the phase has the actual limit
                    ssl_shutdown_timeout=limits.unread_s,
                )
        except OSError:
            self._connections.count("handshake_failed")
        finally:
            self._connections.remove(handshake)

    def _protocol(self, handshake: Handshake) -> SecureConnection:
        """Returns the protocol that uvicorn would make."""
        return SecureConnection(
            handshake,
            self._connections,
            wants_certificate=self._wants_certificate,
            config=self._server.config,
            server_state=self._server.server_state,
            app_state={},
        )

    async def _speaks_tls(self, sock: socket.socket) -> bool:
        """Returns whether a client speaks TLS; otherwise it gets an error. Raises OSError if it has disconnected."""
        begin = await _first_byte(sock)
        if begin and begin != _HANDSHAKE:
            self._connections.count("plain_text")
            # Unread data would reset the connection before the answer arrives.
            sock.recv(1 << 16)
            sock.send(response(ApiError(400, "this port speaks TLS: use https:// instead of http://")))
            sock.shutdown(socket.SHUT_WR)
        return begin == _HANDSHAKE


async def _first_byte(sock: socket.socket) -> bytes:
    """Returns the first byte without consuming it; b"" if the client has disconnected. Raises OSError."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def on_readable() -> None:  # may be called twice before it is removed
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock, on_readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)
