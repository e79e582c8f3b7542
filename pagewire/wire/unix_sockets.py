"""Unix sockets, as servers make them."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def private() -> Iterator[None]:
    """Unix sockets that are made within are for this user alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def is_served(path: str) -> bool:
    """Whether a process listens on a unix socket: gRPC would take the path from it, and leave it without callers."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(path)
        except BlockingIOError:
            return True  # it listens, and takes nobody at the moment
        except OSError:
            return False
        return True
