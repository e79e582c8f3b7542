"""What every HTTP request passes before its route: request id, key, size, shutdown, access log, metrics.

Plain ASGI: Starlette's own middleware base costs a task and a queue per request and hides disconnects.
"""

import asyncio
import hmac
import logging
import re
import time
import uuid
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.gateway import metrics
from pagewire.gateway.errors import ApiError, error_response
from pagewire.gateway.schema import REQUEST_ID_PATTERN

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
PROBES = frozenset({"/health", "/livez", "/readyz"})
_QUIET = PROBES | {"/metrics"}
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_SCOPE_KEY = "pagewire.exchange"
# nginx's status for a client that went away before its answer; never on the wire.
CLIENT_GONE = 499


class Exchange:
    """One HTTP request and its response, as the log and the metrics see them."""

    __slots__ = ("note", "request_id", "send", "started", "status")

    def __init__(self, request_id: str, send: Send) -> None:
        """send: the server's own, for a body whose head has passed through everything between."""
        self.request_id = request_id
        self.send = send
        self.started = time.monotonic()
        self.status = 0
        self.note = ""

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[_SCOPE_KEY]
    return exchange


class Drain:
    """Whether this gateway is shutting down, and what it still answers."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


class Edge:
    def __init__(self, app: ASGIApp, *, api_key: str | None, drain: Drain) -> None:
        self._app = app
        self._api_key = api_key.encode() if api_key else None
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given_id = headers.get(b"x-request-id", b"").decode("latin-1")
        exchange = Exchange(given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex, send)
        scope[_SCOPE_KEY] = exchange
        quiet = scope["path"] in _QUIET
        metrics.HTTP_IN_FLIGHT.inc()
        if not quiet:
            self._drain.enter()
        try:
            await self._answer(scope, headers, receive, _sender(exchange, send))
        finally:
            if not quiet:
                self._drain.leave()
            metrics.HTTP_IN_FLIGHT.dec()
            _account(scope, exchange, quiet)

    async def _answer(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        refusal = self._refuse(scope["path"], headers)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        try:
            await self._app(scope, _limited(receive), send)
        except ClientDisconnect:  # with a part of its body unsent
            metrics.CLIENTS_GONE.inc()
        except Exception:
            exchange = exchange_of(scope)
            logger.exception("unexpected error", extra={"request_id": exchange.request_id})
            if exchange.status:
                # The head is out: the cut connection is all that can still tell the client.
                raise
            await error_response(ApiError(500, "internal error; the gateway's log has the cause"))(scope, receive, send)

    def _refuse(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if path in PROBES:
            return None
        if self._api_key is not None and not self._authorized(headers.get(b"authorization", b"")):
            return ApiError(
                401, "missing or wrong API key: send the header Authorization: Bearer KEY", code="invalid_api_key"
            )
        if self._drain.draining and path not in _QUIET:
            return ApiError(503, "this gateway is shutting down; try again")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return ApiError(413, _too_large())
        return None

    def _authorized(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        assert self._api_key is not None
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key)


def _too_large() -> str:
    return f"the body is larger than {MAX_BODY_BYTES} bytes"


def _limited(receive: Receive) -> Receive:
    """Bodies without a Content-Length are measured as they come."""
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, _too_large())
        return message

    return limited


def _sender(exchange: Exchange, send: Send) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", exchange.request_id.encode())]
        await send(message)

    return sender


def _account(scope: Scope, exchange: Exchange, quiet: bool) -> None:
    route: Any = scope.get("route")
    # Paths that are no route would make one time series each.
    path = getattr(route, "path", "unknown")
    status = exchange.status or CLIENT_GONE
    metrics.HTTP_REQUESTS.labels(scope["method"], path, str(status)).inc()
    metrics.HTTP_DURATION.labels(scope["method"], path).observe(exchange.elapsed)
    if not quiet:
        logger.info(
            "%s %s %d %.3fs%s", scope["method"], quote(scope["path"]), status, exchange.elapsed, exchange.note,
            extra={"request_id": exchange.request_id},
        )  # fmt: skip
