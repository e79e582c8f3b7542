"""Files that cannot be written: the cause and the remedy, known before any work is done for them."""

import errno
import os
from pathlib import Path

from pagewire.errors import StartupError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def unwritable(path: Path | str, error: OSError) -> StartupError:
    """Returns the error of a file, or a directory, that cannot be written."""
    remedy = "free some space, or name one on another disk" if error.errno in _FULL else "name one that can be written"
    return StartupError(f"{path} cannot be written ({error.strerror or error}): {remedy}")


def check_writable(path: Path) -> None:
    """Raises StartupError if no file or directory can be made at `path`."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if place != path and not place.is_dir():
        raise unwritable(path, OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(place, os.W_OK):
        is_read_only = bool(os.statvfs(place).f_flag & os.ST_RDONLY)
        raise unwritable(path, OSError(errno.EROFS, os.strerror(errno.EROFS if is_read_only else errno.EACCES)))
    if os.statvfs(place).f_bavail == 0:
        raise unwritable(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def check_directory(flag: str, path: Path) -> None:
    """Raises StartupError if `path`, the value of a flag, is no directory that can be written, and cannot become
    one."""
    if path.exists() and not path.is_dir():
        raise unwritable(f"{flag} {path}", NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    try:
        check_writable(path)
    except StartupError as error:
        raise StartupError(f"{flag} {error}") from error
