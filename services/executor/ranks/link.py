"""The sockets between a leader and its followers: frames of protobuf messages, and how both ends prove who they are."""

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
_MOST_BYTES = 1 << 27  # of a frame: more than a step has, which comes over gRPC (`rpc.MAX_MESSAGE_BYTES`)
_UNIX = "unix:"
_CONNECT_EVERY_S = 0.1
_CLOSED = "the other end has closed the connection"


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, data: bytes) -> Self: ...


M = TypeVar("M", bound=_Message)


class Link:
    """One end. One thread receives; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self.is_local = sock.family == socket.AF_UNIX
        if not self.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: _Message, descriptor: int | None = None) -> None:
        """Raises OSError. descriptor: of a file that the other end, on this machine, is to have open, too."""
        data = message.SerializeToString()
        self.send_frame(_LENGTH.pack(len(data)) + data, descriptor)

    def send_frame(self, frame: bytes, descriptor: int | None = None) -> None:
        """What `frame_of` has made."""
        with self._sending:
            if descriptor is None:
                self._send_bytes(frame)
            else:
                sent = socket.send_fds(self._socket, [frame], [descriptor])
                self._socket.sendall(frame[sent:])

    def receive(self, kind: type[M]) -> M:
        """The next message. Raises EOFError once the other end has gone, OSError."""
        return self._message(kind, self._exactly(_LENGTH.size))

    def receive_with_descriptor(self, kind: type[M]) -> tuple[M, int | None]:
        """As `receive`, of one that may have come with a descriptor; over a unix socket."""
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
        if not head:
            raise EOFError(_CLOSED)
        message = self._message(kind, head + self._exactly(_LENGTH.size - len(head)))
        return message, descriptors[0] if descriptors else None

    def _message(self, kind: type[M], head: bytes) -> M:
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_BYTES:
            raise EOFError(f"a frame of {length} bytes: the other end is none of Pagewire's")
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
        """How many bytes; 0: the other end has closed."""
        return self._socket.recv_into(view)

    def has_something(self, timeout: float) -> bool:
        """Whether there is something to receive, or the other end has gone, within so many seconds."""
        return self._poll(select.POLLIN, timeout)

    def has_gone(self, timeout: float) -> bool:
        """Whether the other end goes within so many seconds, whatever is left to be received."""
        return self._poll(select.POLLRDHUP, timeout)

    def _poll(self, events: int, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(1000 * timeout))

    def close(self) -> None:
        """Whoever receives is told so."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was first
        self._socket.close()


def frame_of(message: _Message) -> bytes:
    """For those who send the same to several."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


def listen(address: str) -> socket.socket:
    """At unix:/path or host:port. Raises StartupError."""
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
            f"--leader {address}: cannot listen there ({error.strerror or error}): stop what is using it, or choose "
            "another address, of this machine"
        ) from error


def connect(address: str, gives_up: threading.Event, secured: Callable[[socket.socket], Link] = Link) -> Link:
    """Waits until the leader is there. secured: makes a link of what is connected over TCP. Raises StartupError for an
    address that is none, or once `gives_up` is set, and what `secured` raises."""
    target = None if address.startswith(_UNIX) else _host_and_port(address)
    while not gives_up.wait(_CONNECT_EVERY_S):
        try:
            if target is not None:
                return secured(socket.create_connection(target))
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(address.removeprefix(_UNIX))
            return Link(sock)
        except OSError:
            pass  # it is not there yet
    raise StartupError(f"stopped before the leader was found at {address}")


def is_local(address: str) -> bool:
    """Whether who connects is on this machine for certain."""
    return address.startswith(_UNIX)


def host_of(address: str) -> str:
    """Where the others find who listens at the address."""
    return "127.0.0.1" if is_local(address) else _host_and_port(address)[0]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise StartupError(f"--leader {address}: expected host:port or unix:/path")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Refused(Exception):
    """Somebody connected who is not to be let in; the message says why."""


def let_in(link: Link, secret: str, flags: Mapping[str, str], num_ranks: int) -> RankHello:
    """The leader's side, up to its welcome. Raises Refused, EOFError, OSError."""
    nonce = secrets.token_bytes(32)
    link.send(RankChallenge(nonce=nonce))
    hello = link.receive(RankHello)
    if not hmac.compare_digest(hello.proof, _proof(secret, nonce, hello.rank)):
        raise Refused("it has another --group-secret")
    if not 1 <= hello.rank < num_ranks:
        raise Refused(f"there is no rank {hello.rank} among {num_ranks}: --rank is from 0, and each has its own")
    if hello.version != __version__:
        raise Refused(f"it is Pagewire {hello.version}, the leader {__version__}: run the same on all ranks")
    differing = sorted(name for name in flags.keys() | hello.flags if flags.get(name) != hello.flags.get(name))
    if differing:
        told = ", ".join(f"{name} {hello.flags.get(name)} (the leader's: {flags.get(name)})" for name in differing)
        raise Refused(f"other flags than the leader's: {told}: give all ranks the same")
    return hello


def welcome(link: Link, secret: str, hello: RankHello, store: str, descriptor: int | None) -> None:
    link.send(RankWelcome(proof=_proof(secret, hello.nonce, 0), store=store), descriptor)


def refuse(link: Link, reason: str) -> None:
    link.send(RankWelcome(refusal=reason))


def introduce(link: Link, secret: str, rank: int, flags: Mapping[str, str]) -> tuple[RankWelcome, int | None]:
    """The follower's side; the descriptor of the shared memory, if there is any. Raises StartupError, EOFError,
    OSError."""
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
        raise StartupError("who listens at --leader has another --group-secret")
    return answer, descriptor


def _proof(secret: str, nonce: bytes, rank: int) -> bytes:
    """Whose rank it is keeps an answer from being sent back as one's own."""
    return hmac.digest(secret.encode(), nonce + b"%d" % rank, hashlib.sha256)
