"""A file that somebody keeps: one address a line."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from pagewire.wire.discovery.listed import Listed

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2


class AddressesInFile:
    """`ADDRESS`, or `ADDRESS NAME` where the certificate there is of another name; `#` begins a comment.

    A file that is not there lists nobody; one that cannot be read is as it was. Whoever changes it replaces it (writes
    another and renames it), so that no half of it is read.
    """

    def __init__(self, path: Path, interval: float = _LOOK_EVERY_S) -> None:
        """interval: seconds between looks at it."""
        self._path = path
        self._interval = interval
        self._seen: tuple[int, ...] | None = None
        self._told = ""

    async def lists(self) -> AsyncIterator[Sequence[Listed]]:
        last: list[Listed] | None = None
        while True:
            listed = self._read()
            if listed is not None and listed != last:
                last = listed
                yield listed
            await asyncio.sleep(self._interval)

    def _read(self) -> list[Listed] | None:
        """None if it is the same file as last time, or cannot be read."""
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen:
                return None
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            self._seen = None
            return []
        except (OSError, UnicodeDecodeError) as error:
            if str(error) != self._told:
                self._told = str(error)
                logger.error("%s cannot be read (%s): the executors are those that it had last", self._path, error)
            return None
        self._seen, self._told = seen, ""
        words = [line.partition("#")[0].split() for line in lines]
        return list(dict.fromkeys(Listed(*entry[:2]) for entry in words if entry))


def has_addresses(path: Path) -> bool:
    """Whether anybody is listed."""
    return path.exists() and bool(path.read_text().strip())
