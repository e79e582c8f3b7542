"""One HTTP connection, which reports its phase and refuses requests that two servers might parse differently."""

import asyncio
import logging
import sys
import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.request_context import OVER_LIMIT
from pagewire.gateway.http.connections import Connections, Phase
from pagewire.gateway.http.upgrade import head_without_offer

# A line for each invalid request would let any client fill the log; they are counted and logged together.
logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != "Invalid HTTP request received.")


class Connection(HttpToolsProtocol):
    """A uvicorn connection with limits and phases."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.phase = Phase.IDLE
        self.over_limit = False
        self.body_bytes = 0
        self._connections = connections
        self._limits = connections.limits
        self._parsing = Phase.IDLE
        self._head_bytes = 0
        self._data = b""  # the latest data
        self._is_last = False  # no request follows the present one
        self._error = ApiError(400, "the request is not valid HTTP/1.1")

    def __hash__(self) -> int:
        return id(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._parsing is Phase.IDLE:
            self._parsing = Phase.HEAD
            self._head_bytes = 0
            self._moved()
        if self._parsing is Phase.HEAD:
            self._head_bytes += len(data)
        self._data = data
        super().data_received(data)
        if self._parsing is Phase.HEAD and self._head_bytes > self._limits.head_bytes:
            self._refuse_head()
            self.send_400_response("")

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._parsing = Phase.HEAD
        super().on_message_begin()
        if self.over_limit and len(self._connections) > self._limits.connections:
            self.scope[OVER_LIMIT] = True  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.rstrip(b" \t"))  # not part of the value (RFC 9110, 5.5), but the parser keeps it

    def on_headers_complete(self) -> None:
        if self._head_bytes > self._limits.head_bytes:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._limits.head_bytes:
                self._refuse_head()
                raise ValueError("headers too large")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and (hosts or self.parser.get_http_version() == "1.1"):
            self._error = ApiError(400, f"a request must have one Host header, not {hosts}")
            raise ValueError("no host, or several")
        if len(self.pipeline) >= self._limits.pipelined:
            self._error = ApiError(
                400, f"more than {self._limits.pipelined} requests wait for answers on this connection"
            )
            raise ValueError("too many requests at once")
        if self._offers_upgrade():
            return
        super().on_headers_complete()
        if self.over_limit or self._is_last:
            self.cycle.keep_alive = False
        self._parsing = Phase.BODY
        self.body_bytes = 0
        self._moved()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        super().on_message_complete()
        self._parsing = Phase.IDLE
        self._head_bytes = 0
        self._moved()

    # Callbacks of the answer.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the phases have timeouts
        self._moved()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.stalled[self] = time.monotonic()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connections.stalled.pop(self, None)

    def send_400_response(self, msg: str) -> None:
        """Ends the connection after invalid data; uvicorn's own method would log a line for each."""
        self._connections.count("invalid")
        self.give_up(self._error)

    def give_up(self, error: ApiError | None = None) -> None:
        """Closes the connection, and sends the error unless it would be inside another answer."""
        if error is None or self.flow.write_paused:
            self.transport.abort()
            return
        # In the middle of a body, the error answers the last request; otherwise the next one.
        begun = self.cycle is not None and self.cycle.response_started
        answered = self.cycle is None or self.cycle.response_complete
        if not self.pipeline and (not begun if self._parsing is Phase.BODY else answered):
            self.transport.write(response(error))
        self.transport.close()

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        # Two servers might disagree on where the next request begins, so none follows.
        self._is_last = True
        if not self._offers_upgrade():
            self.cycle.keep_alive = False
            return
        (offset,) = sys.exception().args  # type: ignore[union-attr]  # uvicorn calls this in its exception handler
        parser = self.parser
        head = head_without_offer(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self.data_received(head + self._data[offset:])

    def _refuse_head(self) -> None:
        self._error = ApiError(431, f"the headers of a request may have at most {self._limits.head_bytes} bytes")

    def _moved(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        phase = self._parsing
        if answering and phase is not Phase.BODY:
            phase = Phase.ANSWER
        if phase is not self.phase:
            self._connections.move(self, phase)


def response(error: ApiError) -> bytes:
    """Returns the bytes of an error that ends a connection."""
    body = encode(error.body())
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return STATUS_LINE[error.status] + head.encode() + body
