"""A file of addresses, one a line, which another program updates."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from pagewire.wire.discovery.listed import Listed

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.2


class AddressesInFile:
    """The services in a file. A line is `ADDRESS`, or `ADDRESS NAME` if its certificate has another name; `#` begins a
    comment.

    A missing file lists no service; while a file cannot be read, its last content counts. Replace the file by renaming
    a new one, so that no partial content is read.
    """

    def __init__(self, path: Path, interval: float = _CHECK_INTERVAL_S) -> None:
        """interval: seconds between checks."""
        self._path = path
        self._interval = interval
        self._seen: tuple[int, ...] | None = None
        self._logged = ""

    async def lists(self) -> AsyncIterator[Sequence[Listed]]:
        last: list[Listed] | None = None
        while True:
            listed = self._read()
            if listed is not None and listed != last:
                last = listed
                yield listed
            await asyncio.sleep(self._interval)

    def _read(self) -> list[Listed] | None:
        """Returns None for an unchanged file, or one that cannot be read."""
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
            if str(error) != self._logged:
                self._logged = str(error)
                logger.error("%s cannot be read (%s); its last executors stay in use", self._path, error)
            return None
        self._seen, self._logged = seen, ""
        words = [line.partition("#")[0].split() for line in lines]
        return list(dict.fromkeys(Listed(*entry[:2]) for entry in words if entry))


def has_addresses(path: Path) -> bool:
    """Returns whether any service is listed."""
    return path.exists() and bool(path.read_text().strip())
