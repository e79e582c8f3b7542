"""The sockets between a leader and its followers: frames of protobuf messages, and proofs that both know a secret."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self, TypeVar

from pagewire import __version__
from pagewire.errors import StartupError
from pagewire.v1.rank_link_pb2 import RankChallenge, RankHello, RankWelcome

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 27  # limit of a frame, above that of a step over gRPC (`rpc.MAX_MESSAGE_BYTES`)
_UNIX = "unix:"
_CONNECT_EVERY_S = 0.1
_CLOSED = "the other end has closed the connection"


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, data: bytes) -> Self: ...


M = TypeVar("M", bound=_Message)


class Link:
    """One end of a connection. One thread receives; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self.is_local = sock.family == socket.AF_UNIX
        if not self.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: _Message, descriptor: int | None = None) -> None:
        """Sends a message. Raises OSError. descriptor: a file that the other end, on this machine, opens too."""
        data = message.SerializeToString()
        self.send_frame(_LENGTH.pack(len(data)) + data, descriptor)

    def send_frame(self, frame: bytes, descriptor: int | None = None) -> None:
        """Sends what `frame_of` returned."""
        with self._sending:
            if descriptor is None:
                self._send_bytes(frame)
            else:
                sent = socket.send_fds(self._socket, [frame], [descriptor])
                self._socket.sendall(frame[sent:])

    def receive(self, kind: type[M]) -> M:
        """Returns the next message. Raises EOFError once the other end has closed, OSError."""
        return self._message(kind, self._exactly(_LENGTH.size))

    def receive_with_descriptor(self, kind: type[M]) -> tuple[M, int | None]:
        """Receives a message, and the descriptor that came with it, if one did. Only over a unix socket."""
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
        if not head:
            raise EOFError(_CLOSED)
        message = self._message(kind, head + self._exactly(_LENGTH.size - len(head)))
        return message, descriptors[0] if descriptors else None

    def _message(self, kind: type[M], head: bytes) -> M:
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_BYTES:
            raise EOFError(f"a frame of {length} bytes: the other end is not a rank of Pagewire")
        return kind.FromString(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._receive_into(view)
            if not received:
                raise EOFError(_CLOSED)
            view = view[received:]
        return bytes(data)

    def _send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _receive_into(self, view: memoryview) -> int:
        """Returns how many bytes were received; 0: the other end has closed."""
        return self._socket.recv_into(view)

    def has_something(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds; returns whether there is data to receive or the other end has closed."""
        return self._poll(select.POLLIN, timeout)

    def has_gone(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds; returns whether the other end has closed, even if data is left to receive."""
        return self._poll(select.POLLRDHUP, timeout)

    def _poll(self, events: int, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(1000 * timeout))

    def close(self) -> None:
        """Closes the connection, for a thread that is receiving too."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has closed first
        self._socket.close()


def frame_of(message: _Message) -> bytes:
    """Returns the bytes of a message, for sending to several links."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


def listen(address: str) -> socket.socket:
    """Listens at unix:/path or host:port. Raises StartupError."""
    try:
        if address.startswith(_UNIX):
            path = Path(address.removeprefix(_UNIX))
            path.unlink(missing_ok=True)
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen()
            return sock
        host, port = _host_and_port(address)
        return socket.create_server((host, port))
    except OSError as error:
        raise StartupError(
            f"--leader {address}: cannot listen there ({error.strerror or error}); stop the process that uses it, "
            "or choose another address of this machine"
        ) from error


def connect(address: str, gives_up: threading.Event, secured: Callable[[socket.socket], Link] = Link) -> Link:
    """Waits until the leader listens, and connects. secured: makes a link of a TCP connection.

    Raises StartupError for an invalid address, or once `gives_up` is set, and what `secured` raises.
    """
    target = None if address.startswith(_UNIX) else _host_and_port(address)
    while not gives_up.wait(_CONNECT_EVERY_S):
        try:
            if target is not None:
                return secured(socket.create_connection(target))
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(address.removeprefix(_UNIX))
            return Link(sock)
        except OSError:
            pass  # the leader does not listen yet
    raise StartupError(f"stopped before the leader was found at {address}")


def is_local(address: str) -> bool:
    """Returns whether the other end is on this machine for certain."""
    return address.startswith(_UNIX)


def host_of(address: str) -> str:
    """Returns the host under which other ranks find this address."""
    return "127.0.0.1" if is_local(address) else _host_and_port(address)[0]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise StartupError(f"--leader {address}: expected host:port or unix:/path")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Refused(Exception):
    """A connected process that must not join; the message says why."""


def let_in(link: Link, secret: str, flags: Mapping[str, str], num_ranks: int) -> RankHello:
    """Runs the leader's side of the handshake, up to its welcome. Raises Refused, EOFError, OSError."""
    nonce = secrets.token_bytes(32)
    link.send(RankChallenge(nonce=nonce))
    hello = link.receive(RankHello)
    if not hmac.compare_digest(hello.proof, _proof(secret, nonce, hello.rank)):
        raise Refused("it has another --group-secret")
    if not 1 <= hello.rank < num_ranks:
        raise Refused(f"--rank {hello.rank} is not within 1 to {num_ranks - 1}; give each rank its own")
    if hello.version != __version__:
        raise Refused(f"it is Pagewire {hello.version}, the leader {__version__}; run the same version on all ranks")
    differing = sorted(name for name in flags.keys() | hello.flags if flags.get(name) != hello.flags.get(name))
    if differing:
        listed = ", ".join(f"{name} {hello.flags.get(name)} (the leader's: {flags.get(name)})" for name in differing)
        raise Refused(f"its flags differ from the leader's: {listed}; give all ranks the same")
    return hello


def welcome(link: Link, secret: str, hello: RankHello, store: str, descriptor: int | None) -> None:
    link.send(RankWelcome(proof=_proof(secret, hello.nonce, 0), store=store), descriptor)


def refuse(link: Link, reason: str) -> None:
    link.send(RankWelcome(refusal=reason))


def introduce(link: Link, secret: str, rank: int, flags: Mapping[str, str]) -> tuple[RankWelcome, int | None]:
    """Runs the follower's side of the handshake; also returns the descriptor of the shared memory, if there is any.

    Raises StartupError, EOFError, OSError.
    """
    nonce = secrets.token_bytes(32)
    challenge = link.receive(RankChallenge)
    hello = RankHello(
        rank=rank,
        version=__version__,
        flags=flags,
        proof=_proof(secret, challenge.nonce, rank),
        nonce=nonce,
        pid=os.getpid(),
        host=socket.gethostname(),
    )
    link.send(hello)
    answer, descriptor = (
        link.receive_with_descriptor(RankWelcome) if link.is_local else (link.receive(RankWelcome), None)
    )
    if answer.refusal:
        raise StartupError(f"the leader refuses rank {rank}: {answer.refusal}")
    if not hmac.compare_digest(answer.proof, _proof(secret, nonce, 0)):
        raise StartupError("the process that listens at --leader has another --group-secret; give all ranks the same")
    return answer, descriptor


def _proof(secret: str, nonce: bytes, rank: int) -> bytes:
    """Returns a proof of the secret. It contains the rank, so another rank cannot send it back."""
    return hmac.digest(secret.encode(), nonce + b"%d" % rank, hashlib.sha256)
