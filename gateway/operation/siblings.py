"""Queries between the gateway processes of one data directory.

A scrape reaches one process and shows the metrics of all; an account of a request may be in another process, too.

Each process has a place, which is a number from 0: it locks a file and opens a Unix socket that answers one line. A
place is free again when its process ends, so the number of names in metrics stays small.
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
from pagewire.wire.local import unix_sockets

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
# The first line of a query.
_METRICS, _EXPLAIN = b"metrics", b"explain "


class Siblings:
    def __init__(self, directory: Path, exposition: Callable[[], str], accounts: Accounts) -> None:
        """directory: the data directory. exposition, accounts: those of this process."""
        self._directory = directory / "metrics"
        self._exposition = exposition
        self._accounts = accounts
        self._place: IO[bytes] | None = None
        self._server: asyncio.Server | None = None
        self.number = 0

    async def start(self) -> None:
        """Takes a place. On a file system without sockets, only this process is visible, and a warning is logged."""
        try:
            self._take_place()
            listening = socket.socket(socket.AF_UNIX)
            with unix_sockets.private(), _reachable(self._directory) as path:
                listening.bind(f"{path}/{self.number}.sock")
            self._server = await asyncio.start_unix_server(self._answer, sock=listening)
        except OSError as error:
            logger.warning("metrics of other gateways in %s are not available: %s", self._directory, error)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with suppress(OSError):
                self._own_socket.unlink()
        if self._place is not None:
            self._place.close()

    async def metrics(self) -> list[ServiceMetrics]:
        """Returns the metrics of all processes that answer, including this one."""
        expositions = {self.number: self._exposition()}
        expositions |= {number: answer.decode() for number, answer in (await self._ask_all(_METRICS)).items()}
        return [
            ServiceMetrics(service="gateway", address=f"gateway-{number}", exposition=exposition)
            for number, exposition in expositions.items()
        ]

    async def accounts(self, wanted: ExplainRequestRequest) -> list[RequestAccount]:
        """Returns the other processes' accounts of a request."""
        answers = await self._ask_all(_EXPLAIN + b64encode(wanted.SerializeToString()))
        accounts: list[RequestAccount] = []
        for number, answer in answers.items():
            try:
                accounts += ExplainRequestResponse.FromString(answer).accounts
            except DecodeError:  # it was killed while it answered, or has an older version
                logger.warning("the account of a request from gateway-%d cannot be read", number)
        return accounts

    async def _ask_all(self, line: bytes) -> dict[int, bytes]:
        """Returns the answers of the other processes, by place."""
        others = [number for number in self._places() if number != self.number]
        answers = await asyncio.gather(*(self._ask(number, line) for number in others))
        return {number: answer for number, answer in zip(others, answers, strict=True) if answer is not None}

    def _take_place(self) -> None:
        """Takes the first free place, and removes the socket of its previous process."""
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

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            return None  # the process has ended


SIBLINGS = AppState[Siblings]("siblings")


@contextmanager
def _reachable(directory: Path) -> Iterator[str]:
    """Yields a short path of a directory, where the system has one: paths of Unix sockets have at most 107 bytes."""
    if not hasattr(os, "O_PATH"):
        yield str(directory)
        return
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
