"""The HTTP connections of a gateway process: how many, for how long, and who has to leave when there is no room.

A connection is in one of a few phases. What it may do in each is bounded, so that clients that connect and then send
little or nothing cannot keep others out. Who waits for an answer, or gets one, is bounded by nothing here but by
whether he takes what he is sent.
"""

import asyncio
import enum
import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagewire.gateway import metrics
from pagewire.gateway.connection_limits import Limits
from pagewire.gateway.errors import ApiError, last_response
from pagewire.gateway.request_context import OVER_LIMIT
from pagewire.gateway.upgrade import head_without_offer

logger = logging.getLogger(__name__)
# One line for each invalid request would let anybody fill the log; they are counted, and told of together.
logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != "Invalid HTTP request received.")


class Phase(enum.Enum):
    HANDSHAKE = "handshake"  # of TLS
    IDLE = "idle"  # before the first byte of a request
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"  # a request is complete and its answer is not


class Bounded(Protocol):
    """A connection, also before it speaks HTTP."""

    phase: Phase
    over_limit: bool

    def give_up(self, error: ApiError | None = None) -> None: ...


class Connections:
    """All of one process. Each phase has its connections in the order in which they came into it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.phases: dict[Phase, dict[Any, float]] = {phase: {} for phase in Phase}
        self.stalled: dict[Any, float] = {}  # which do not take what they are sent
        self._closed: Counter[str] = Counter()  # since the last line in the log, by reason
        self._logged_at = -limits.log_every_s
        metrics.HTTP_CONNECTION_LIMIT.set(limits.connections)
        for phase in Phase:
            metrics.HTTP_CONNECTIONS.labels(phase.value).set_function(partial(len, self.phases[phase]))

    def __len__(self) -> int:
        return sum(map(len, self.phases.values()))

    def protocol(self, **uvicorns: Any) -> "Connection":
        """What uvicorn makes of every connection."""
        return Connection(self, **uvicorns)

    def add(self, connection: Bounded) -> None:
        """Makes room for it; if nobody can leave, it is one of the reserve, or closed."""
        if len(self) >= self.limits.connections:
            self._make_room()
            connection.over_limit = len(self) >= self.limits.connections
            if len(self) >= self.limits.connections + self.limits.reserve:
                self.count("refused")
                connection.give_up()
                return
        self.phases[connection.phase][connection] = time.monotonic()

    def move(self, connection: "Connection", phase: Phase) -> None:
        # One that was given up still ends its work, but is counted no more.
        if self.phases[connection.phase].pop(connection, None) is not None:
            self.phases[phase][connection] = time.monotonic()
        connection.phase = phase

    def remove(self, connection: Bounded) -> None:
        self.phases[connection.phase].pop(connection, None)
        self.stalled.pop(connection, None)

    def end_handshakes(self) -> None:
        for connection in list(self.phases[Phase.HANDSHAKE]):
            connection.give_up()

    def count(self, reason: str) -> None:
        self._closed[reason] += 1
        metrics.HTTP_CONNECTIONS_CLOSED.labels(reason).inc()

    async def watch(self) -> None:
        """Closes what takes too long, and tells of what was closed. Runs until it is cancelled."""
        tick = min(
            1.0, self.limits.idle_s / 4, self.limits.head_s / 4, self.limits.body_s / 4, self.limits.unread_s / 4
        )
        while True:
            await asyncio.sleep(tick)
            self._close_late(time.monotonic(), tick)
            self._log()

    def _make_room(self) -> None:
        """Who has been idle longest leaves, else whose handshake or headers have been coming longest."""
        if idle := next(iter(self.phases[Phase.IDLE]), None):
            self._give_up(idle, "idle_for_new")
            return
        for phase in (Phase.HANDSHAKE, Phase.HEAD):
            if slow := next(_since(self.phases[phase], time.monotonic() - self.limits.new_s), None):
                self._give_up(slow, f"{phase.value}_for_new")
                return

    def _close_late(self, now: float, tick: float) -> None:
        limits = self.limits
        for connection in list(_since(self.phases[Phase.IDLE], now - limits.idle_s)):
            self._give_up(connection, "idle_timeout")
        for connection in list(_since(self.phases[Phase.HANDSHAKE], now - limits.head_s)):
            self._give_up(connection, "handshake_timeout")
        late = f"the headers of a request have to come within {limits.head_s:g} s"
        for connection in list(_since(self.phases[Phase.HEAD], now - limits.head_s)):
            self._give_up(connection, "head_timeout", ApiError(408, late))
        bodies = self.phases[Phase.BODY]
        for connection, since in list(bodies.items()):
            if connection.flow.read_paused:  # it is the gateway that takes its time
                bodies[connection] += tick
            elif now - since > limits.body_s + connection.body_bytes / limits.body_bytes_per_s:
                late = f"the body of a request has to come at {limits.body_bytes_per_s} bytes per second or faster"
                self._give_up(connection, "body_timeout", ApiError(408, late))
        for connection in list(_since(self.stalled, now - limits.unread_s)):
            self._give_up(connection, "unread")

    def _give_up(self, connection: Bounded, reason: str, error: ApiError | None = None) -> None:
        self.count(reason)
        self.remove(connection)
        connection.give_up(error)

    def _log(self) -> None:
        now = time.monotonic()
        if self._closed and now - self._logged_at >= self.limits.log_every_s:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self._closed.items()))
            logger.warning(
                "connections closed: %s; %d are open of at most %d (raise `ulimit -n` for more)",
                reasons, len(self), self.limits.connections,
            )  # fmt: skip
            self._closed.clear()
            self._logged_at = now


def _since(connections: dict[Any, float], before: float) -> Iterator[Any]:
    """Those that have been there since before then."""
    return (one for one, _ in itertools.takewhile(lambda item: item[1] <= before, connections.items()))


class Connection(HttpToolsProtocol):
    """uvicorn's, which tells in which phase it is, and takes no more than the limits say."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.phase = Phase.IDLE
        self.over_limit = False
        self.body_bytes = 0
        self._connections = connections
        self._limits = connections.limits
        self._parsing = Phase.IDLE
        self._head_bytes = 0
        self._data = b""  # the latest that came
        self._is_last = False  # no other request follows the one that is read
        self._error = ApiError(400, "this is not a valid HTTP/1.1 request")

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

    # The parser's.

    def on_message_begin(self) -> None:
        self._parsing = Phase.HEAD
        super().on_message_begin()
        if self.over_limit and len(self._connections) > self._limits.connections:
            self.scope[OVER_LIMIT] = True  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.rstrip(b" \t"))  # which is no part of it (RFC 9110, 5.5); the parser leaves it

    def on_headers_complete(self) -> None:
        if self._head_bytes > self._limits.head_bytes:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._limits.head_bytes:
                self._refuse_head()
                raise ValueError("headers too large")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and (hosts or self.parser.get_http_version() == "1.1"):
            self._error = ApiError(400, f"a request has one Host header, not {hosts}")
            raise ValueError("no host, or several")
        if len(self.pipeline) >= self._limits.pipelined:
            self._error = ApiError(400, f"more than {self._limits.pipelined} requests wait for answers")
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

    # The answer's.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the phases have time-outs
        self._moved()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.stalled[self] = time.monotonic()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connections.stalled.pop(self, None)

    def send_400_response(self, msg: str) -> None:
        """What the parser does not take ends the connection; uvicorn's own would log a line for each."""
        self._connections.count("invalid")
        self.give_up(self._error)

    def give_up(self, error: ApiError | None = None) -> None:
        """Closes the connection; says why where that is no part of another answer."""
        if error is None or self.flow.write_paused:
            self.transport.abort()
            return
        # In the middle of a body, the last request is the one that ends; otherwise it is one after that.
        begun = self.cycle is not None and self.cycle.response_started
        answered = self.cycle is None or self.cycle.response_complete
        if not self.pipeline and (not begun if self._parsing is Phase.BODY else answered):
            self.transport.write(last_response(error))
        self.transport.close()

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        # Where the one protocol ends and the other would begin is not for two to guess: no request follows.
        self._is_last = True
        if not self._offers_upgrade():
            self.cycle.keep_alive = False
            return
        (offset,) = sys.exception().args  # type: ignore[union-attr]  # uvicorn calls this where it handles it
        parser = self.parser
        head = head_without_offer(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self.data_received(head + self._data[offset:])

    def _refuse_head(self) -> None:
        self._error = ApiError(431, f"the headers of a request may have {self._limits.head_bytes} bytes")

    def _moved(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        phase = self._parsing
        if answering and phase is not Phase.BODY:
            phase = Phase.ANSWER
        if phase is not self.phase:
            self._connections.move(self, phase)
