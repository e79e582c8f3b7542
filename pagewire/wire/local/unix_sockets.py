"""Unix sockets of servers."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STREAM_SUFFIX = ".stream"  # of the socket for streams beside that of a server
_UNIX = "unix:"


@contextmanager
def private() -> Iterator[None]:
    """Makes unix sockets that are created in the context accessible to this user alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def remove(path: Path) -> None:
    """Removes a unix socket, if there is one; anything else at the path stays."""
    if path.is_socket():
        path.unlink(missing_ok=True)


def is_served(path: str) -> bool:
    """Returns whether a process listens on a unix socket, from which gRPC would silently take the path."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(path)
        except BlockingIOError:
            return True  # it listens, with a full queue
        except OSError:
            return False
        return True


def stream_path(address: str) -> str | None:
    """Returns the path of the socket for streams beside a gRPC address; None if it has none."""
    path = address.removeprefix(_UNIX)
    return f"{path}{STREAM_SUFFIX}" if address.startswith(_UNIX) else None
