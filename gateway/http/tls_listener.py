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

_HANDSHAKE = b"\x16"  # what TLS begins with
_NO_DESCRIPTORS_S = 1.0
_WRITE_BUFFER = 64 * 1024  # as of connections without TLS


class Handshake:
    """A connection of which nothing is known yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.phase = Phase.HANDSHAKE
        self.over_limit = False
        self.is_over = False
        self.is_the_loops = False  # which closes it then, whatever happens
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._end)

    def give_up(self, error: ApiError | None = None) -> None:
        """Closes it; there is no way to say why."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._end()

    def _end(self, task: object = None) -> None:
        self.is_over = True
        if not self.is_the_loops:
            self.sock.close()


class SecureConnection(Connection):
    """One whose handshake is done."""

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
    """Takes connections of a listening socket through their handshakes; whoever speaks no TLS is told so.

    To uvicorn it is one of its servers.
    """

    def __init__(self, tls: ServiceTls, connections: Connections, sock: socket.socket, server: uvicorn.Server) -> None:
        """Begins at once. sock: whoever has opened it closes it."""
        assert tls.certificates is not None
        sock.setblocking(False)
        self._sock = sock
        self._certificates = tls.certificates
        self._wants_certificate = tls.wants_certificates
        self._connections = connections
        self._server = server
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """No connection is taken any more, and handshakes end."""
        self._task.cancel()
        self._connections.end_handshakes()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while True:
                handshake = Handshake(await self._accept())
                self._connections.add(handshake)
                if not handshake.is_over:
                    handshake.begin(self._open(handshake))
        except Exception:
            logger.exception("no connections are taken any more")
            self._server.should_exit = True

    async def _accept(self) -> socket.socket:
        while True:
            try:
                return (await asyncio.get_running_loop().sock_accept(self._sock))[0]
            except OSError as error:
                logger.error("no connection can be accepted: %s", error)
                await asyncio.sleep(_NO_DESCRIPTORS_S)

    async def _open(self, handshake: Handshake) -> None:
        limits = self._connections.limits
        try:
            if await self._speaks_tls(handshake.sock):
                handshake.is_the_loops = True
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._protocol(handshake),
                    handshake.sock,
                    ssl=self._certificates.current().context,
                    ssl_handshake_timeout=2 * limits.head_s,  # the limit itself is that of its phase
                    ssl_shutdown_timeout=limits.unread_s,
                )
        except OSError:
            self._connections.count("handshake_failed")
        finally:
            self._connections.remove(handshake)

    def _protocol(self, handshake: Handshake) -> SecureConnection:
        """What uvicorn makes of a connection."""
        return SecureConnection(
            handshake,
            self._connections,
            wants_certificate=self._wants_certificate,
            config=self._server.config,
            server_state=self._server.server_state,
            app_state={},
        )

    async def _speaks_tls(self, sock: socket.socket) -> bool:
        """Tells a client that does not. Raises OSError for one that is gone."""
        begin = await _first_byte(sock)
        if begin and begin != _HANDSHAKE:
            self._connections.count("plain_text")
            # What has been sent and is not read would reset the connection before the answer is there.
            sock.recv(1 << 16)
            sock.send(response(ApiError(400, "this port speaks TLS: use https:// in place of http://")))
            sock.shutdown(socket.SHUT_WR)
        return begin == _HANDSHAKE


async def _first_byte(sock: socket.socket) -> bytes:
    """Leaves it there. b"": the client is gone. Raises OSError."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def tell() -> None:  # perhaps twice, before it is taken away
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock, tell)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)
