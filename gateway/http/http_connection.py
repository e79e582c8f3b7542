"""One HTTP connection, which reports its phase and refuses requests that two servers might parse differently."""

import asyncio
import logging
import select
import sys
import time
from collections.abc import Iterable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.request_context import HANG_UP, OVER_LIMIT
from pagewire.gateway.http.connections import Connections, Phase
from pagewire.gateway.http.upgrade import head_without_offer

# Headers of which two servers might take different ones.
_SINGLE = frozenset({b"authorization", b"content-type", b"host", b"x-api-key"})

_TLS = b"\x16\x03"  # the first bytes of a handshake

# Seconds after each probe of a client that has ended its side: enough for the round trip to most clients.
_PROBES = (0.01, 0.05, 0.2, 0.5, 5.0)  # the last one again and again: the client may leave later
# Seconds between two looks at a connection of which nothing is read.
_LOOK_S = 2.0

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
        self._answering: Any = None  # the uvicorn cycle of the request that is answered
        self._looks_for_end = False
        self._parsing = Phase.IDLE
        self._head_bytes = 0
        self._unread_bytes = 0  # since the last part of the body
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
        super().connection_lost(exc)  # which tells the last request alone
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

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
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._parsing is Phase.BODY and self._unread_bytes > self._limits.head_bytes:
            # The parser keeps trailers and the like until they end.
            self._error = ApiError(400, f"more than {self._limits.head_bytes} bytes between two parts of the body")
            self.send_400_response("")
            return
        if self._parsing is Phase.HEAD and self._head_bytes > self._limits.head_bytes:
            self._refuse_head()
            self.send_400_response("")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open: a client may end its side alone, after a whole request.

        Not with TLS: asyncio ends a connection in both directions when its client ends one.
        """
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._parsing is not Phase.IDLE or not is_answering or self.transport.get_extra_info("sslcontext"):
            return False
        if self.scope["http_version"] != "1.1":  # such a client cannot be probed
            return self.scope["method"] in ("GET", "HEAD")
        self.cycle.keep_alive = False  # that of the last request
        self._probe(*_PROBES)
        return True

    def _probe(self, *delays: float) -> None:
        """Sends an interim answer, or a comment in a stream of events: if the client has closed the whole connection,
        its system refuses the first, and sending the next one fails. The end of one side and of both look the same
        otherwise."""
        answering = self._answering
        if self.transport.is_closing() or (answering.response_complete and not self.pipeline):
            return
        if not answering.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif answering.chunked_encoding:  # events alone have no length, and each part of the body has whole ones
            self.transport.write(b"3\r\n:\n\n\r\n")
        self.loop.call_later(delays[0], self._probe, *(delays[1:] or delays))

    def _look_for_end(self) -> None:
        """Notices that a client has ended its side although nothing is read, because it has sent requests ahead."""
        self._looks_for_end = not self.transport.is_closing() and bool(self.pipeline) and hasattr(select, "POLLRDHUP")
        if not self._looks_for_end:
            return
        ended = select.poll()
        ended.register(self.transport.get_extra_info("socket"), select.POLLRDHUP)
        found = ended.poll(0)
        if found and found[0][1] & (select.POLLHUP | select.POLLERR):
            self.transport.abort()
        elif found and not self.transport.get_extra_info("sslcontext"):
            self._probe(*_PROBES)
        else:
            self.loop.call_later(_LOOK_S, self._look_for_end)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._parsing = Phase.HEAD
        super().on_message_begin()
        self.scope[HANG_UP] = self.transport.close  # type: ignore[literal-required]
        if self.over_limit and len(self._connections) > self._limits.connections:
            self.scope[OVER_LIMIT] = True  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._parsing is Phase.BODY:
            return  # a trailer: merged into the head, it could replace what a proxy has checked (RFC 9110, 6.5.1)
        super().on_header(name, value.rstrip(b" \t"))  # not part of the value (RFC 9110, 5.5), but the parser keeps it

    def on_headers_complete(self) -> None:
        if self._head_bytes > self._limits.head_bytes:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._limits.head_bytes:
                self._refuse_head()
                raise ValueError("headers too large")
        single = [name for name, _ in self.headers if name in _SINGLE]
        if b"host" not in single and self.parser.get_http_version() == "1.1":
            self._error = ApiError(400, "a request must have a Host header")
            raise ValueError("no host")
        if len(single) > len(set(single)):
            twice = max(single, key=single.count).decode()
            self._error = ApiError(400, f"a request may have only one header {twice}")
            raise ValueError("a header twice")
        if len(self.pipeline) >= self._limits.pipelined:
            self._error = ApiError(
                400, f"more than {self._limits.pipelined} requests wait for answers on this connection"
            )
            raise ValueError("too many requests at once")
        if self._offers_upgrade():
            return
        super().on_headers_complete()
        if self.pipeline and not self._looks_for_end:
            self._look_for_end()
        if self.over_limit or self._is_last:
            self.cycle.keep_alive = False
        self._parsing = Phase.BODY
        self.body_bytes = self._unread_bytes = 0
        self._moved()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        super().on_message_complete()
        self._parsing = Phase.IDLE
        self._head_bytes = 0
        self._moved()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

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
        self._connections.count("tls" if self._data.startswith(_TLS) and not self.url else "invalid")
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
            cors = self._connections.cors
            self.transport.write(response(error, () if cors is None else cors.of_answer(self.headers or ())))
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


def response(error: ApiError, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Returns the bytes of an error that ends a connection."""
    body = encode(error.body())
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    more = b"".join(b"%b: %b\r\n" % header for header in headers)
    return STATUS_LINE[error.status] + head.encode() + more + b"\r\n" + body
