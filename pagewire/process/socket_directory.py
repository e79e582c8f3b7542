"""The directory of a stack's Unix sockets: only its user may replace them."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from pagewire.errors import StartupError

# A unix socket's path has at most 104 bytes on macOS, 108 on Linux.
_MAX_SOCKET_PATH = 100


def socket_names(executors: Iterable[str]) -> list[str]:
    """Returns the names of the processes with a socket on this machine. executors: those of executors."""
    return ["tokenizer", "scheduler", *executors]


def check_socket_directory(directory: Path, names: Iterable[str]) -> None:
    """Raises StartupError for a directory with too long a name, of another user, or that is shared: a user who may
    write to it could replace the socket of a service.

    directory: need not exist yet.
    """
    for name in names:
        path = directory / f"{name}.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise StartupError(f"the path {path} is too long for a unix socket: use a shorter --uds-dir")
    if not directory.exists():
        return
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise StartupError(
            f"--uds-dir {directory}: it belongs to another user, who could replace the sockets; use a directory of your"
            " own, for instance a new one inside it"
        )
    if status.st_mode & 0o022:
        # A directory like /tmp must stay open to all users.
        private = "" if status.st_mode & stat.S_ISVTX else f"run `chmod 700 {directory}`, or "
        raise StartupError(
            f"--uds-dir {directory}: other users may write to it and replace the sockets"
            f" (mode {status.st_mode & 0o7777:o}); {private}use a new directory inside it"
        )
