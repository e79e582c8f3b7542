"""The link between a leader and a follower over TLS. Both ends show certificates, like services."""

from __future__ import annotations

import socket
import ssl
import threading
from typing import cast

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor.ranks.link import Link, host_of, is_local
from pagewire.wire.tls import Files, client_context, failed_handshake

_READ_BYTES = 65536


class TlsLink(Link):
    """A link that can send while a thread waits to receive, which an ssl.SSLSocket cannot."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str | None = None) -> None:
        """host: the name that the other end must prove; None: this is the server's end. Raises OSError."""
        super().__init__(sock)
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=host is None, server_hostname=host)
        self._lock = threading.Lock()  # of the TLS state, not of the socket
        self._shake_hands()

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._socket.sendall(self._to_send.read())
                self._wait_for_bytes()
            finally:
                self._socket.sendall(self._to_send.read())  # also sends the alert of a failure

    def _wait_for_bytes(self) -> None:
        data = self._socket.recv(_READ_BYTES)
        with self._lock:
            if data:
                self._received.write(data)
            else:
                self._received.write_eof()

    def _send_bytes(self, data: bytes) -> None:
        with self._lock:
            self._tls.write(data)  # writes everything: memory is never full
            encrypted = self._to_send.read()
        self._socket.sendall(encrypted)

    def _receive_into(self, view: memoryview) -> int:
        while True:
            with self._lock:
                try:
                    return cast(int, self._tls.read(len(view), view))  # type: ignore[arg-type] # bytes without a buffer
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                    return 0
            self._wait_for_bytes()

    def has_something(self, timeout: float) -> bool:
        with self._lock:
            is_here = self._tls.pending() or self._received.pending
        return bool(is_here) or super().has_something(timeout)


def has_tls(config: ExecutorConfig) -> bool:
    """Returns whether the ranks of a group speak TLS with their leader."""
    return bool(config.ssl_certfile and config.ssl_ca_certs) and not is_local(config.leader)


def leaders_link(config: ExecutorConfig, sock: socket.socket) -> Link:
    """Returns the leader's end of a new connection. Raises OSError."""
    if not has_tls(config):
        return Link(sock)
    files = _files(config)
    assert files.certfile is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # made anew each time: files may have changed
    context.load_cert_chain(files.certfile, files.key)
    context.load_verify_locations(files.ca_certs)
    context.verify_mode = ssl.CERT_REQUIRED
    return TlsLink(sock, context)


def followers_link(config: ExecutorConfig, sock: socket.socket) -> Link:
    """Returns the follower's end. Raises StartupError, which explains a failure of TLS, or OSError."""
    if not has_tls(config):
        return Link(sock)
    try:
        return TlsLink(sock, client_context(_files(config)), host_of(config.leader))
    except ssl.SSLError as error:
        raise StartupError(f"--leader {config.leader}: {failed_handshake(str(error)) or error}") from error


def _files(config: ExecutorConfig) -> Files:
    return Files(certfile=config.ssl_certfile, keyfile=config.ssl_keyfile, ca_certs=config.ssl_ca_certs)
