"""The gateway processes of one data directory tell each other their metrics: a scrape reaches whichever takes the
connection, and is to show all of them.

Each has a place, from 0 on: a file that it holds locked, and beside it a Unix socket on which it tells its exposition
to whoever connects. Who is gone has left its place to the next, so names stay few.
"""

import asyncio
import fcntl
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from pagewire import unix_sockets
from pagewire.v1.admin_pb2 import ServiceMetrics

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0


class Siblings:
    def __init__(self, directory: Path, exposition: Callable[[], str]) -> None:
        """directory: of the gateways' data. exposition: of this process."""
        self._directory = directory / "metrics"
        self._exposition = exposition
        self._place: IO[bytes] | None = None
        self._server: asyncio.Server | None = None
        self.number = 0

    async def start(self) -> None:
        """If the file system has no sockets, this process tells of itself alone, and so does the log."""
        try:
            self._take_place()
            listening = socket.socket(socket.AF_UNIX)
            with unix_sockets.private(), _reachable(self._directory) as path:
                listening.bind(f"{path}/{self.number}.sock")
            self._server = await asyncio.start_unix_server(self._tell, sock=listening)
        except OSError as error:
            logger.warning("no metrics of other gateways in %s: %s", self._directory, error)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with suppress(OSError):
                self._own_socket.unlink()
        if self._place is not None:
            self._place.close()

    async def metrics(self) -> list[ServiceMetrics]:
        """Of all that answer, this one included."""
        own = ServiceMetrics(service="gateway", address=f"gateway-{self.number}", exposition=self._exposition())
        others = [number for number in self._places() if number != self.number]
        told = await asyncio.gather(*map(self._ask, others))
        return [own, *(one for one in told if one is not None)]

    def _take_place(self) -> None:
        """And removes the socket of who had it."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for number in itertools.count():
            place = (self._directory / f"{number}.lock").open("wb")  # held for the life of the process
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                place.close()
                continue
            self._place, self.number = place, number
            self._own_socket.unlink(missing_ok=True)
            return

    @property
    def _own_socket(self) -> Path:
        return self._directory / f"{self.number}.sock"

    def _places(self) -> list[int]:
        names = (path.stem for path in self._directory.glob("*.sock"))
        return sorted(int(name) for name in names if name.isdigit())

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            writer.write(self._exposition().encode())
            await writer.drain()

    async def _ask(self, number: int) -> ServiceMetrics | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                with _reachable(self._directory) as path:
                    reader, writer = await asyncio.open_unix_connection(f"{path}/{number}.sock")
                with closing(writer):
                    exposition = (await reader.read()).decode()
        except (OSError, TimeoutError):
            return None  # it has ended
        return ServiceMetrics(service="gateway", address=f"gateway-{number}", exposition=exposition)


@contextmanager
def _reachable(directory: Path) -> Iterator[str]:
    """A short name of a directory, where there are such: paths of Unix sockets have 107 bytes."""
    if not hasattr(os, "O_PATH"):
        yield str(directory)
        return
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
