"""The reason for which a service ended: it writes it into the pipe of its beats, where the supervisor reads it."""

import os
from contextlib import suppress

_MARK = b"\0"  # among beats
_LONGEST = 4000  # bytes


def tell_supervisor(descriptor: int | None, reason: str) -> None:
    """Tells the supervisor why this process ends.

    descriptor: the value of HEARTBEAT_FD; None: there is no supervisor.
    """
    if descriptor is not None:
        with suppress(OSError):  # it has ended
            os.write(descriptor, _MARK + reason.encode(errors="replace")[:_LONGEST])


def read_reason(pipe: int) -> str:
    """Returns the reason that a service wrote before it ended; "": it wrote none."""
    with suppress(BlockingIOError):
        _, mark, reason = os.read(pipe, 65536).rpartition(_MARK)
        return reason.decode(errors="replace") if mark else ""
    return ""
