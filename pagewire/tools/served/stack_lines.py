"""The models of a running stack, for commands: which there are, and to load them or take them out of memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from pagewire.errors import StartupError
from pagewire.v1 import lines_pb2, lines_pb2_grpc
from pagewire.wire.rpc import RpcError

if TYPE_CHECKING:
    from pagewire.stack.running import RunningStack

_TIMEOUT_S = 5.0
READY, ASLEEP, LOADING = lines_pb2.LINE_STATE_READY, lines_pb2.LINE_STATE_ASLEEP, lines_pb2.LINE_STATE_LOADING


class StackLines:
    """The LineService of a stack of this user. Calls raise StartupError, with the reason of the stack."""

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        self._channel = grpc.aio.insecure_channel(stack.lines)
        self._stub = lines_pb2_grpc.LineServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def listed(self) -> list[lines_pb2.Line]:
        """Returns all models; the first is the default one."""
        call = self._stub.WatchLines(lines_pb2.WatchLinesRequest(), timeout=_TIMEOUT_S)
        try:
            async for update in call:
                return list(update.lines)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()
        return []

    async def loaded(self, name: str, show: Callable[[str], None] | None = None) -> lines_pb2.Line:
        """Loads or wakes the model, unless it serves already, and returns it once it serves. show: receives what
        happens, in words, whenever that changes."""
        asked = (await self._answer(self._stub.RequestLine(lines_pb2.RequestLineRequest(name=name)))).line
        if asked.state == READY:
            return asked  # type: ignore[no-any-return]
        async for line in self._watched(asked.name):
            if line.state == READY:
                return line
            if line.problem and line.state != LOADING:
                raise StartupError(f"{name} cannot be loaded: {line.problem}")
            if show is not None:
                show(f"{name} {line.progress or ('loads' if line.state == LOADING else 'waits for memory')}")
        raise StartupError(f"{name} is no longer served by process {self._stack.pid}; `pagewire ps` shows what is")

    async def ended(self, name: str) -> lines_pb2.Line:
        """Ends the processes of the model once none of its requests runs, and returns it then."""
        request = lines_pb2.RestLineRequest(name=name, end_processes=True)
        return (await self._answer(self._stub.RestLine(request))).line  # type: ignore[no-any-return]

    async def _watched(self, name: str) -> AsyncIterator[lines_pb2.Line]:
        """Yields the model whenever something about it may have changed, until it is gone."""
        call = self._stub.WatchLines(lines_pb2.WatchLinesRequest())
        try:
            async for update in call:
                line = next((line for line in update.lines if line.name == name), None)
                if line is None:
                    return
                yield line
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()

    async def _answer(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error

    def _failure(self, error: grpc.aio.AioRpcError) -> StartupError:
        known = RpcError.from_call(error)
        if known.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return StartupError(f"the stack of process {self._stack.pid} does not answer ({known.message})")
        return StartupError(known.message)


def has_name(line: lines_pb2.Line, name: str) -> bool:
    """Returns whether requests may call the model so."""
    return name in (line.name, *line.served_names, *line.aliases)
