"""The gateway processes of one data directory ask each other for what one alone does not know: a scrape reaches
whichever takes the connection, and is to show all of them; so does who asks about a request that another has answered.

Each has a place, from 0 on: a file that it holds locked, and beside it a Unix socket on which it answers a line. Who is
gone has left its place to the next, so names stay few.
"""

import asyncio
import fcntl
import itertools
import logging
import os
import socket
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError

from pagewire.gateway.core.app_state import AppState
from pagewire.telemetry.recent import Accounts
from pagewire.v1.admin_pb2 import ExplainRequestRequest, ExplainRequestResponse, RequestAccount, ServiceMetrics
from pagewire.wire import unix_sockets

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
# What is asked, in a line.
_METRICS, _EXPLAIN = b"metrics", b"explain "


class Siblings:
    def __init__(self, directory: Path, exposition: Callable[[], str], accounts: Accounts) -> None:
        """directory: of the gateways' data. exposition, accounts: of this process."""
        self._directory = directory / "metrics"
        self._exposition = exposition
        self._accounts = accounts
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
        expositions = {self.number: self._exposition()}
        expositions |= {number: told.decode() for number, told in (await self._ask_all(_METRICS)).items()}
        return [
            ServiceMetrics(service="gateway", address=f"gateway-{number}", exposition=exposition)
            for number, exposition in expositions.items()
        ]

    async def accounts(self, wanted: ExplainRequestRequest) -> list[RequestAccount]:
        """What the others know of a request."""
        told = await self._ask_all(_EXPLAIN + b64encode(wanted.SerializeToString()))
        accounts: list[RequestAccount] = []
        for number, answer in told.items():
            try:
                accounts += ExplainRequestResponse.FromString(answer).accounts
            except DecodeError:  # it was killed as it answered, or is of an older version
                logger.warning("what gateway-%d knows of a request cannot be read", number)
        return accounts

    async def _ask_all(self, line: bytes) -> dict[int, bytes]:
        """The answers of all others that give one, by place."""
        others = [number for number in self._places() if number != self.number]
        answers = await asyncio.gather(*(self._ask(number, line) for number in others))
        return {number: answer for number, answer in zip(others, answers, strict=True) if answer is not None}

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
        with closing(writer), suppress(ConnectionError, ValueError, TimeoutError, DecodeError):
            async with asyncio.timeout(TIMEOUT_S):
                line = (await reader.readline()).rstrip()
            if line == _METRICS:
                writer.write(self._exposition().encode())
            elif line.startswith(_EXPLAIN):
                wanted = ExplainRequestRequest.FromString(b64decode(line.removeprefix(_EXPLAIN)))
                tenant = wanted.tenant if wanted.HasField("tenant") else None
                accounts = self._accounts.find(wanted.request_id, tenant)
                writer.write(ExplainRequestResponse(accounts=accounts).SerializeToString())
            await writer.drain()

    async def _ask(self, number: int, line: bytes) -> bytes | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                with _reachable(self._directory) as path:
                    reader, writer = await asyncio.open_unix_connection(f"{path}/{number}.sock")
                with closing(writer):
                    writer.write(line + b"\n")
                    return await reader.read()
        except (OSError, TimeoutError):
            return None  # it has ended


SIBLINGS = AppState[Siblings]("siblings")


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
