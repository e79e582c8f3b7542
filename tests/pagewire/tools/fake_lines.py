"""A LineService with models that a test sets, for commands."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from pagewire.v1 import lines_pb2, lines_pb2_grpc

ABSENT, LOADING = lines_pb2.LINE_STATE_UNSPECIFIED, lines_pb2.LINE_STATE_LOADING
READY, ASLEEP = lines_pb2.LINE_STATE_READY, lines_pb2.LINE_STATE_ASLEEP


class FakeLines(lines_pb2_grpc.LineServiceServicer):
    """The last of its models loads when it is requested: `steps` has what WatchLines then says of it."""

    def __init__(self, *lines: lines_pb2.Line) -> None:
        self.lines = list(lines)
        self.steps: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str]] = []
        self.refusal = ""

    def WatchLines(self, request: Any, context: Any) -> Iterator[lines_pb2.WatchLinesResponse]:
        yield lines_pb2.WatchLinesResponse(lines=self.lines)
        while self.steps and self.lines[-1].state == LOADING:
            self._set(self.lines[-1], self.steps.pop(0))
            yield lines_pb2.WatchLinesResponse(lines=self.lines)
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()

    def RequestLine(self, request: Any, context: Any) -> lines_pb2.RequestLineResponse:
        self.calls.append(("request", request.name))
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        line = self._named(request.name)
        if line.state != READY and line.tokenizer_address:
            line.state = READY
        elif line.state != READY:
            line.state = LOADING
        return lines_pb2.RequestLineResponse(line=line)

    def RestLine(self, request: Any, context: Any) -> lines_pb2.RestLineResponse:
        self.calls.append(("end" if request.end_processes else "sleep", request.name))
        line = self._named(request.name)
        line.state, line.tokenizer_address = ABSENT, ""
        return lines_pb2.RestLineResponse(line=line)

    def _named(self, name: str) -> lines_pb2.Line:
        return next(line for line in self.lines if name in (line.name, *line.served_names, *line.aliases))

    @staticmethod
    def _set(line: lines_pb2.Line, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(line, name, value)


@contextmanager
def serving(service: FakeLines, address: str) -> Iterator[str]:
    """Serves it at the address, in threads, and yields the address."""
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        lines_pb2_grpc.add_LineServiceServicer_to_server(service, server)
        server.add_insecure_port(address)
        server.start()
        yield address
        server.stop(None).wait()
