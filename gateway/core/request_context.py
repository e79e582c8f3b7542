"""The context of an HTTP request, from the middleware to the last byte of its answer."""

import time
from collections.abc import Mapping
from contextvars import ContextVar

from starlette.types import Receive, Scope, Send

from pagewire.gateway.core.errors import OPENAI, Dialect

_SCOPE_KEY = "pagewire.request"

# The form of a client's request id, which is returned in a header.
REQUEST_ID_PATTERN = r"^[\x21-\x7e]{1,128}$"

# Scope key of the tenant of a request that the gateway itself makes.
IN_PROCESS = "pagewire.in_process"

# The deadline of the present request, by time.monotonic(); None: no deadline.
deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
# What the client of the present request sends after its body: that it has gone; None: there is no client.
receiving: ContextVar[Receive | None] = ContextVar("receiving", default=None)


def time_left() -> float | None:
    """Returns the seconds until the deadline of the present request; None: no deadline."""
    end = deadline.get()
    return None if end is None else max(0.0, end - time.monotonic())


# nginx's status for a client that disconnected before its answer; never sent.
CLIENT_GONE = 499
# Scope key of a request over a connection above the limit: only probes and metrics are answered.
OVER_LIMIT = "pagewire.over_limit"
# Scope key of a request without a required client certificate: only probes are answered.
NO_CERTIFICATE = "pagewire.no_certificate"
# Scope key of a function that closes the connection of a request after what is written.
HANG_UP = "pagewire.hang_up"


class RequestContext:
    """One HTTP request and its response, as the log and the metrics see them."""

    __slots__ = ("created", "dialect", "names", "note", "request_id", "send", "started", "status", "trace_id")

    def __init__(self, request_id: str, send: Send, dialect: Dialect = OPENAI) -> None:
        """
        Args:
            send: the server's send(), for the body of an answer after its head has passed the middleware.
            dialect: the API that the client speaks.
        """
        self.request_id = request_id
        self.send = send
        self.dialect = dialect
        self.created = int(time.time())  # Unix time, seconds
        self.started = time.monotonic()
        self.status = 0
        self.note = ""
        self.names: Mapping[str, str] = {}  # the client's names of fields: see field_names.py
        self.trace_id = ""  # 32 hexadecimal digits; "" = not traced

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started


def add_context(scope: Scope, context: RequestContext) -> None:
    scope[_SCOPE_KEY] = context


def request_context(scope: Scope) -> RequestContext:
    context: RequestContext = scope[_SCOPE_KEY]
    return context
