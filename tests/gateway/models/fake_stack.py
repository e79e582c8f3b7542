"""A stack without models: it tells lines, and starts a fake tokenizer service for each that is requested."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from pagewire.v1 import lines_pb2, lines_pb2_grpc
from pagewire.v1.lines_pb2 import Line, LineState
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError
from tests.gateway.fake_tokenizer import FakeTokenizer

ABSENT, LOADING = LineState.LINE_STATE_UNSPECIFIED, LineState.LINE_STATE_LOADING
READY, ASLEEP = LineState.LINE_STATE_READY, LineState.LINE_STATE_ASLEEP


class FakeStack(lines_pb2_grpc.LineServiceServicer):
    def __init__(self, directory: Path) -> None:
        self.address = f"unix:{directory}/lines.sock"
        self.lines: dict[str, Line] = {}  # the first is the default one
        self.services: dict[str, FakeTokenizer] = {}
        self.default_line = ""
        self.may_load = asyncio.Event()  # cleared: lines go on loading
        self.may_load.set()
        self.problems: dict[str, str] = {}  # why a line cannot be loaded
        self.retry_s = 100.0  # after a problem
        self.forgets = False  # every wish, as if it was taken back at once
        self.refusal: RpcError | None = None  # of every RequestLine
        self.requests: list[lines_pb2.RequestLineRequest] = []
        self.rests: list[str] = []
        self._directory = directory
        self._changed = asyncio.Event()
        self._loading: set[asyncio.Task[None]] = set()
        self._num_started = 0
        self._server: rpc.Server | None = None

    async def start(self) -> None:
        self._server = rpc.Server([self.address], shutdown_timeout=0.1)
        self._server.add(self, lines_pb2_grpc.add_LineServiceServicer_to_server, "pagewire.v1.LineService")
        await self._server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        self._changed.set()
        if server is not None:
            await server.stop()

    async def close(self) -> None:
        await rpc.cancel(list(self._loading))
        await self.stop()
        for service in self.services.values():
            service.running.set()
            await service.stop()

    # -- what a test does --------------------------------------------------------------------------------------------

    def add(self, name: str, **members: object) -> FakeTokenizer:
        """Adds an absent line, and returns the service that it will have."""
        self.lines[name] = Line(name=name, served_names=[name], **members)  # type: ignore[arg-type]
        self.services[name] = service = FakeTokenizer()
        service.models = [name]
        self.tell()
        return service

    async def load(self, name: str) -> None:
        line = self.lines[name]
        line.ClearField("problem")
        line.ClearField("retry_time")
        line.state = LOADING
        self.tell()
        await self.may_load.wait()
        if problem := self.problems.get(name):
            line.state, line.problem = ABSENT, problem
            line.retry_time.GetCurrentTime()
            line.retry_time.seconds += round(self.retry_s)
        else:
            if not line.tokenizer_address:
                self._num_started += 1
                line.tokenizer_address = f"unix:{self._directory}/{self._num_started}.sock"
                await self.services[name].start(line.tokenizer_address)
            line.state, line.num_loads = READY, line.num_loads + 1
        self.tell()

    async def end(self, name: str) -> None:
        """Ends the processes of a line."""
        line = self.lines[name]
        line.state, line.tokenizer_address = ABSENT, ""
        self.tell()
        await self.services[name].stop()

    def tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -- the service -------------------------------------------------------------------------------------------------

    async def WatchLines(self, request, context) -> AsyncIterator[lines_pb2.WatchLinesResponse]:
        while self._server is not None:
            changed = self._changed
            yield lines_pb2.WatchLinesResponse(
                lines=self.lines.values(), default_line=self.default_line, memory_bytes=4 << 30
            )
            await changed.wait()

    def _named(self, name: str) -> Line:
        for line in self.lines.values():
            if name in (*line.served_names, *line.aliases):
                return line
        raise RpcError(grpc.StatusCode.NOT_FOUND, f"there is no model {name}")

    async def RequestLine(self, request, context) -> lines_pb2.RequestLineResponse:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        line = self._named(request.name)
        if line.state in (ABSENT, ASLEEP) and not self.forgets:
            task = asyncio.create_task(self.load(line.name))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)
        return lines_pb2.RequestLineResponse(line=line)

    async def RestLine(self, request, context) -> lines_pb2.RestLineResponse:
        line = self._named(request.name)
        self.rests.append(line.name)
        line.state = ASLEEP
        self.tell()
        return lines_pb2.RestLineResponse(line=line)

    async def PutLine(self, request, context) -> lines_pb2.PutLineResponse:
        settings = json.loads(request.settings_json)
        if settings["model"] == "wrong":
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "model: there is no model 'wrong'")
        if request.name in self.lines and settings["model"] == "other":
            raise RpcError(grpc.StatusCode.ALREADY_EXISTS, f"{request.name} is another model; delete it first")
        created = request.name not in self.lines
        if created:
            self.add(request.name, aliases=settings.get("aliases", ()), size_bytes=7)
        return lines_pb2.PutLineResponse(line=self.lines[request.name], created=created)

    async def DeleteLine(self, request, context) -> lines_pb2.DeleteLineResponse:
        self._named(request.name)
        del self.lines[request.name]
        self.tell()
        return lines_pb2.DeleteLineResponse()
