"""The HTTP connections of a gateway process: their number, their time, and which one closes to make room.

A connection (`http_connection.py`) is in one of a few phases, each with a time limit, so that clients that connect and
then send little or nothing cannot keep others out. A connection that waits for an answer or receives one has no limit
while its client reads.
"""

import asyncio
import enum
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

from pagewire.gateway.core import metrics
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.http.connection_limits import Limits
from pagewire.gateway.http.cors import Cors

logger = logging.getLogger(__name__)


_HINTS = {
    "tls": "tls: clients speak TLS to a port without it: use http://, or serve TLS with --ssl-certfile",
    "plain_text": "plain_text: clients speak HTTP to a port with TLS: use https://",
}


class Phase(enum.Enum):
    HANDSHAKE = "handshake"  # of TLS
    IDLE = "idle"  # before the first byte of a request
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"  # the request is complete, the answer is not


class Limited(Protocol):
    """A connection with limits, also before it speaks HTTP."""

    phase: Phase
    over_limit: bool

    def give_up(self, error: ApiError | None = None) -> None: ...


class Connections:
    """All connections of a process. Those of a phase are in the order in which they entered it."""

    def __init__(self, limits: Limits, cors: Cors | None = None) -> None:
        self.limits, self.cors = limits, cors
        self.phases: dict[Phase, dict[Any, float]] = {phase: {} for phase in Phase}
        self.stalled: dict[Any, float] = {}  # connections with a client that does not read
        self._closed: Counter[str] = Counter()  # since the last line in the log, by reason
        self._logged_at = -limits.log_every_s
        metrics.HTTP_CONNECTION_LIMIT.set(limits.connections)
        for phase in Phase:
            metrics.HTTP_CONNECTIONS.labels(phase.value).set_function(partial(len, self.phases[phase]))

    def __len__(self) -> int:
        return sum(map(len, self.phases.values()))

    def add(self, connection: Limited) -> None:
        """Adds a connection and makes room for it. If there is none, it joins the reserve or is closed."""
        if len(self) >= self.limits.connections:
            self._make_room()
            connection.over_limit = len(self) >= self.limits.connections
            if len(self) >= self.limits.connections + self.limits.reserve:
                self.count("refused")
                connection.give_up()
                return
        self.phases[connection.phase][connection] = time.monotonic()

    def move(self, connection: Limited, phase: Phase) -> None:
        # A connection that was given up finishes its work, but is not counted.
        if self.phases[connection.phase].pop(connection, None) is not None:
            self.phases[phase][connection] = time.monotonic()
        connection.phase = phase

    def remove(self, connection: Limited) -> None:
        self.phases[connection.phase].pop(connection, None)
        self.stalled.pop(connection, None)

    def expect_requests(self) -> bool:
        """Returns whether there are connections that have not had a request yet."""
        phases = self.phases
        new = (connection.cycle is None for phase in (Phase.IDLE, Phase.HEAD) for connection in phases[phase])
        return bool(phases[Phase.HANDSHAKE]) or any(new)

    def end_handshakes(self) -> None:
        for connection in list(self.phases[Phase.HANDSHAKE]):
            connection.give_up()

    def count(self, reason: str) -> None:
        self._closed[reason] += 1
        metrics.HTTP_CONNECTIONS_CLOSED.labels(reason).inc()

    async def watch(self) -> None:
        """Closes connections that take too long, and logs how many were closed, until it is cancelled."""
        tick = min(
            1.0, self.limits.idle_s / 4, self.limits.head_s / 4, self.limits.body_s / 4, self.limits.unread_s / 4
        )
        while True:
            await asyncio.sleep(tick)
            self._close_late(time.monotonic(), tick)
            self._log()

    def _make_room(self) -> None:
        """Closes the connection that has been idle longest, else the one with the oldest handshake or headers."""
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
        late = f"the headers of a request must arrive within {limits.head_s:g} s"
        for connection in list(_since(self.phases[Phase.HEAD], now - limits.head_s)):
            self._give_up(connection, "head_timeout", ApiError(408, late))
        bodies = self.phases[Phase.BODY]
        for connection, since in list(bodies.items()):
            if connection.flow.read_paused:  # the gateway is slow, not the client
                bodies[connection] += tick
            elif now - since > limits.body_s + connection.body_bytes / limits.body_bytes_per_s:
                late = f"the body of a request must arrive at {limits.body_bytes_per_s} bytes per second or faster"
                self._give_up(connection, "body_timeout", ApiError(408, late))
        for connection in list(_since(self.stalled, now - limits.unread_s)):
            self._give_up(connection, "unread")

    def _give_up(self, connection: Limited, reason: str, error: ApiError | None = None) -> None:
        self.count(reason)
        self.remove(connection)
        connection.give_up(error)

    def _log(self) -> None:
        now = time.monotonic()
        if self._closed and now - self._logged_at >= self.limits.log_every_s:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self._closed.items()))
            hints = dict.fromkeys(hint for reason in sorted(self._closed) if (hint := _hint(reason)))
            logger.warning(
                "connections closed: %s; %d of at most %d are open%s",
                reasons, len(self), self.limits.connections, "".join(f"; {hint}" for hint in hints),
            )  # fmt: skip
            self._closed.clear()
            self._logged_at = now


def _hint(reason: str) -> str:
    """Returns the remedy for connections that are closed for a reason; "" if it is their clients' alone."""
    if reason == "refused" or reason.endswith("_for_new"):
        return "raise `ulimit -n` for more"
    return _HINTS.get(reason, "")


def _since(connections: dict[Any, float], before: float) -> Iterator[Any]:
    """Yields the connections that have been in a phase since `before` or earlier."""
    return (one for one, _ in itertools.takewhile(lambda item: item[1] <= before, connections.items()))
