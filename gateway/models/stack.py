"""The stack of this gateway: it decides which lines exist and which of them are in memory."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, cast

import grpc

from pagewire.gateway.core.balanced_stub import Method
from pagewire.gateway.models.line import Addresses, MakeClient, ModelLine
from pagewire.v1 import lines_pb2, lines_pb2_grpc
from pagewire.v1.lines_pb2 import (
    DeleteLineResponse,
    PutLineResponse,
    RequestLineResponse,
    RestLineResponse,
    WatchLinesRequest,
    WatchLinesResponse,
)
from pagewire.wire import rpc
from pagewire.wire.admin import Neighbour
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

AGAIN_S = 0.2  # before a stack that has ended is looked for again
# Before the log says that it has ended: if the whole stack stops, so does this gateway, which is nothing to warn of.
WARN_S = 2.0
CALL_TIMEOUT_S = 10.0


class LineStub(Protocol):
    """The unary methods of `LineService`; what grpc generates has no types."""

    DeleteLine: Method[DeleteLineResponse]
    PutLine: Method[PutLineResponse]
    RequestLine: Method[RequestLineResponse]
    RestLine: Method[RestLineResponse]


class Stack:
    """A `Source` of lines: those that the stack tells. While it does not answer, the last ones count."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address)
        self._stub = lines_pb2_grpc.LineServiceStub(self._channel)
        self.calls = cast(LineStub, self._stub)
        self.told = WatchLinesResponse()
        self._later: set[asyncio.Task[None]] = set()
        self._is_away = asyncio.Event()

    @property
    def unsorted(self) -> list[Neighbour]:
        return []

    def begin(self, models: "Lines") -> None:
        """Does nothing: the stack has not told its lines."""

    async def run(self, models: "Lines") -> None:
        """Follows the lines, until cancelled."""
        warning: asyncio.TimerHandle | None = None
        try:
            while True:
                try:
                    async for told in self._stub.WatchLines(WatchLinesRequest(), wait_for_ready=True):
                        if warning is not None:
                            warning.cancel()
                            warning = None
                            logger.info("the stack tells its models again")
                        self._is_away.clear()
                        self.told = told
                        self._follow(models, told)
                    why = "it has ended the stream"
                except grpc.aio.AioRpcError as error:
                    why = error.details() or error.code().name
                self._is_away.set()
                if warning is None:
                    text = "the stack does not tell its models (%s); the last ones count"
                    warning = asyncio.get_running_loop().call_later(WARN_S, logger.warning, text, why)
                await asyncio.sleep(AGAIN_S)
        finally:
            if warning is not None:
                warning.cancel()
            await rpc.cancel(list(self._later))
            await self._channel.close()

    def _follow(self, models: "Lines", told: WatchLinesResponse) -> None:
        known = {line.name: line for line in models.lines}
        lines = []
        for one in told.lines:
            if (line := known.get(one.name)) is None:
                line = ModelLine(one.name, Addresses(), models.make_client, self._request)
            lines.append(line)
        for line, one in zip(lines, told.lines, strict=True):
            line.update(one)
        models.set_lines(lines, told.default_line)

    async def end_loads(self, models: "Lines", error: RpcError) -> None:
        """Ends what waits for a model that is not in memory once the stack has ended, which would have loaded it; of a
        gateway that ends, too. Returns when it is cancelled."""
        while True:
            await self._is_away.wait()
            for line in models.lines:
                if line.waits:
                    line.fail(error)
            await asyncio.sleep(AGAIN_S)

    async def _request(self, name: str) -> None:
        await self.request(name)

    async def request(self, name: str, idle_seconds: float | None = None) -> None:
        """Asks for a line. idle_seconds: after which it rests, from now on. Raises grpc.aio.AioRpcError."""
        wanted = lines_pb2.RequestLineRequest(name=name, idle_seconds=idle_seconds)
        await self.calls.RequestLine(wanted, timeout=CALL_TIMEOUT_S)

    def keep(self, line: ModelLine, idle_seconds: float) -> None:
        """Has a line rest after so many idle seconds from now on; below 0: never. A failure is only logged."""
        if line.told is not None and not line.told.sleeps_until_woken:
            self._do_later(self.request(line.name, idle_seconds))

    def rest(self, line: ModelLine) -> None:
        """Takes a line out of memory once none of its requests runs. A failure is only logged."""
        self._do_later(self._rest(line.name))

    async def _rest(self, name: str) -> None:
        await self.calls.RestLine(lines_pb2.RestLineRequest(name=name))

    def _do_later(self, call: Coroutine[Any, Any, None]) -> None:
        async def logged() -> None:
            try:
                await call
            except grpc.aio.AioRpcError as error:
                logger.warning("the stack refuses a wish of a client: %s", error.details())

        task = asyncio.create_task(logged())
        self._later.add(task)
        task.add_done_callback(self._later.discard)


class Lines(Protocol):
    """The lines that a source sets."""

    lines: Sequence[ModelLine]
    make_client: MakeClient

    def set_lines(self, lines: Sequence[ModelLine], takes_all: str = "") -> None:
        """Replaces the lines, the default one first. takes_all: the one that serves unknown names."""
