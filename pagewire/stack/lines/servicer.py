"""LineService: what gateways and commands of the same user see of the lines, and wish."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc

from pagewire.config import ServeConfig, json_object
from pagewire.errors import StartupError
from pagewire.flags import lines as settings_of
from pagewire.flags import refusals
from pagewire.stack.lines.line import Line, LineError
from pagewire.stack.lines.lines import Lines
from pagewire.stack.lines.plan import Place
from pagewire.v1 import lines_pb2, lines_pb2_grpc
from pagewire.wire import rpc

_STATES = {
    Place.ABSENT: lines_pb2.LINE_STATE_UNSPECIFIED,
    Place.LOADING: lines_pb2.LINE_STATE_LOADING,
    Place.READY: lines_pb2.LINE_STATE_READY,
    Place.ASLEEP: lines_pb2.LINE_STATE_ASLEEP,
}
_CODES = {
    "unknown": grpc.StatusCode.NOT_FOUND,
    "exists": grpc.StatusCode.ALREADY_EXISTS,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "refused": grpc.StatusCode.FAILED_PRECONDITION,
}
# The least time between two messages of a stream.
_PAUSE_S = 0.05
_NAME = lines_pb2.DESCRIPTOR.services_by_name["LineService"].full_name


def make_server(lines: Lines, base: ServeConfig, address: str) -> rpc.Server:
    """Returns the server at this address. base: the flags of lines that are added later."""
    server = rpc.Server([address], shutdown_timeout=0.0)
    server.add(LineServicer(lines, base), lines_pb2_grpc.add_LineServiceServicer_to_server, _NAME)
    return server


class LineServicer(lines_pb2_grpc.LineServiceServicer):
    """Reads messages, calls Lines, writes messages."""

    def __init__(self, lines: Lines, base: ServeConfig) -> None:
        self._lines, self._base = lines, base

    async def WatchLines(
        self, request: lines_pb2.WatchLinesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[lines_pb2.WatchLinesResponse]:
        sent: lines_pb2.WatchLinesResponse | None = None
        while True:
            changed = self._lines.changed
            answer = self._all()
            if answer != sent:
                sent = answer
                yield answer
            await changed.wait()
            await asyncio.sleep(_PAUSE_S)

    def _all(self) -> lines_pb2.WatchLinesResponse:
        default, lines = self._lines.default, self._lines.lines
        return lines_pb2.WatchLinesResponse(
            lines=map(message_of, lines),
            default_line=default if any(line.name == default for line in lines) else "",
            memory_bytes=self._lines.room.memory,
        )

    async def RequestLine(
        self, request: lines_pb2.RequestLineRequest, context: grpc.aio.ServicerContext
    ) -> lines_pb2.RequestLineResponse:
        idle = request.idle_seconds if request.HasField("idle_seconds") else None
        with _errors():
            return lines_pb2.RequestLineResponse(line=message_of(self._lines.request(request.name, idle)))

    async def RestLine(
        self, request: lines_pb2.RestLineRequest, context: grpc.aio.ServicerContext
    ) -> lines_pb2.RestLineResponse:
        with _errors():
            # It goes on if the caller leaves.
            resting = asyncio.ensure_future(self._lines.rest(request.name, ends=request.end_processes))
            return lines_pb2.RestLineResponse(line=message_of(await asyncio.shield(resting)))

    async def PutLine(
        self, request: lines_pb2.PutLineRequest, context: grpc.aio.ServicerContext
    ) -> lines_pb2.PutLineResponse:
        with _errors():
            settings = await asyncio.to_thread(self._settings, request)
            line, is_new = await self._lines.put(settings)
            return lines_pb2.PutLineResponse(line=message_of(line), created=is_new)

    def _settings(self, request: lines_pb2.PutLineRequest) -> settings_of.LineSettings:
        """Returns the settings of a new line, checked like those at a start. Raises LineError."""
        if not request.name:
            raise LineError("invalid", "name is empty; give the model a name")
        where = f"model {request.name!r:.100}"
        try:
            entry = json_object.loads(request.settings_json)
            if isinstance(entry, dict) and "name" in entry:
                raise ValueError("its name is not one of its settings; leave `name` out")
            settings = settings_of.line_of_entry(entry, settings_of.base_of(self._base), where, request.name)
            refusals.check(settings.config)
        except (ValueError, RecursionError) as error:
            what = "settings are not JSON" if isinstance(error, json.JSONDecodeError) else "settings"
            raise LineError("invalid", f"{where}: {what}: {error}") from error
        except StartupError as error:
            text = str(error)
            raise LineError("invalid", text if text.startswith(where) else f"{where}: {text}") from error
        return settings

    async def DeleteLine(
        self, request: lines_pb2.DeleteLineRequest, context: grpc.aio.ServicerContext
    ) -> lines_pb2.DeleteLineResponse:
        with _errors():
            await asyncio.shield(asyncio.ensure_future(self._lines.delete(request.name)))
        return lines_pb2.DeleteLineResponse()


@contextmanager
def _errors() -> Iterator[None]:
    """Turns a LineError into an error with a status."""
    try:
        yield
    except LineError as error:
        raise rpc.RpcError(_CODES[error.code], str(error), retry_delay=error.retry_after) from error


def message_of(line: Line) -> lines_pb2.Line:
    """Returns a line as a message."""
    message = lines_pb2.Line(
        name=line.name,
        served_names=line.settings.served_names,
        aliases=line.settings.aliases,
        state=_STATES[line.place],
        tokenizer_address="" if line.place is Place.ABSENT else line.processes.address,
        pinned=line.settings.is_pinned,
        problem=line.problem,
        memory_bytes=line.occupant.ready,
        memory_measured=line.sizes.is_measured,
        model=line.model,
        size_bytes=line.size,
        progress=line.progress,
        sleeps_until_woken=line.sleeps_until_woken,
        num_loads=line.num_loads,
        num_failures=line.num_failures,
        num_withdrawals=line.num_withdrawals,
    )
    if line.problem:
        message.retry_time.FromNanoseconds(int(line.retry_at * 1e9))
    if (left := line.rest_in) is not None:
        message.rest_time.FromSeconds(round(time.time() + left))
    return message
