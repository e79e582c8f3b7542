"""The checks of every HTTP request before its route: request id, key, size, shutdown; access log and metrics.

Plain ASGI: Starlette's middleware base takes a task and a queue for each request, and hides disconnects.
"""

import logging
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.gateway.core import metrics
from pagewire.gateway.core.body_room import BodyPlace, BodyRoom
from pagewire.gateway.core.error_handlers import error_response
from pagewire.gateway.core.errors import OPENAI, ApiError, Dialect, from_rpc
from pagewire.gateway.core.request_context import (
    CLIENT_GONE,
    IN_PROCESS,
    NO_CERTIFICATE,
    OVER_LIMIT,
    REQUEST_ID_PATTERN,
    RequestContext,
    add_context,
    deadline,
    receiving,
    request_context,
)
from pagewire.gateway.core.shutdown import GracefulShutdown
from pagewire.process.memory_return import return_memory_after
from pagewire.wire import tenants
from pagewire.wire.keys import Door, caller
from pagewire.wire.keys.header import bearer
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
PROBES = frozenset({"/health", "/livez", "/ping", "/ready", "/readyz"})
_QUIET = PROBES | {"/metrics"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # the router would overlook a line break at the end of a path
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_LENGTH_DIGITS = 20  # of a length; longer numbers take the square of their length
_SHOWN = 200  # characters of a path in a log line

DialectOf = Callable[[str, Mapping[bytes, bytes]], Dialect]


class RequestMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        door: Door,
        shutdown: GracefulShutdown,
        room: BodyRoom,
        body_limits: Mapping[str, int],
        needs_no_key: Callable[[str], bool] = lambda path: False,
        dialect_of: DialectOf = lambda path, headers: OPENAI,
        max_timeout: float | None = None,
        tenant_header: str | None = None,
    ) -> None:
        """
        Args:
            room: for the bodies of all requests in flight.
            body_limits: path -> bytes, for paths with a limit above MAX_BODY_BYTES, which write bodies to files.
            needs_no_key: whether GET and HEAD of a path are served without an API key.
            dialect_of: (path, headers) -> the API that the client speaks.
            max_timeout: seconds that a request may take.
            tenant_header: the header that names the tenant of a request.
        """
        self._max_timeout = max_timeout
        self._app = app
        self._body_limits = body_limits
        self._door = door
        self._needs_no_key = needs_no_key
        self._dialect_of = dialect_of
        self._tenant_header = tenant_header
        self._shutdown = shutdown
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        context = RequestContext(request_id, send, self._dialect_of(scope["path"], headers))
        add_context(scope, context)
        quiet = scope["path"] in _QUIET
        if not quiet:
            metrics.HTTP_IN_FLIGHT.inc()
            self._shutdown.request_begins()
        try:
            await self._answer(scope, headers, receive, _sender(context, send, self._shutdown))
        finally:
            if not quiet:
                self._shutdown.request_ends()
                metrics.HTTP_IN_FLIGHT.dec()
            return_memory_after(_content_length(headers))
            _record(scope, context, quiet)

    async def _answer(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            refusal = self._refuse(scope, headers) or self._set_deadline(scope, headers) or self._admit(scope, held)
            place = None
            if scope["path"] not in self._body_limits:
                place = BodyPlace(self._room, _client(scope))
                held.callback(place.close)
                refusal = refusal or _no_room(place, _content_length(headers))
            await self._answer_unless(refusal, scope, self._limited(scope, receive, place), send)

    async def _answer_unless(self, refusal: ApiError | None, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, send)
            return
        try:
            receiving.set(receive)
            await self._app(scope, receive, send)
        except ClientDisconnect:  # before the end of its body, or before its answer
            metrics.CLIENTS_GONE.inc()
        except Exception:
            context = request_context(scope)
            logger.exception("unexpected error", extra={"request_id": context.request_id})
            if context.status:
                # The head was sent: the client sees only that the connection breaks.
                raise
            error = ApiError(500, "internal error; see the gateway's log")
            await error_response(error, scope)(scope, receive, send)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        path = scope["path"]
        caller.set(None)
        if path in PROBES:
            return None
        if NO_CERTIFICATE in scope:
            message = "this server requires a client certificate of its CA; present one (curl --cert and --key)"
            return ApiError(403, message, code="client_certificate_required")
        if not self._is_let_in(scope, headers):
            message = "missing or wrong API key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            return ApiError(401, message, code="invalid_api_key")
        if OVER_LIMIT in scope and path not in _QUIET:
            return ApiError(503, "this gateway has too many connections; try again")
        if self._shutdown.over and path not in _QUIET:
            return ApiError(503, "this gateway is shutting down; try again")
        if _CONTROL.search(path):
            return ApiError(400, f"the path {_shown(path)} has a line break or another control character; leave it out")
        if _content_length(headers) > (limit := self._body_limit(path)):
            return ApiError(413, _too_large(limit))
        return self._set_tenant(scope)

    def _set_tenant(self, scope: Scope) -> ApiError | None:
        """Sets the tenant of a request. Lines of a batch have the tenant of the batch."""
        header, tenant = self._tenant_header, scope.get(IN_PROCESS)
        if tenant is None:
            name = (header or "").lower().encode()
            given = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
            try:
                tenant = tenants.of_client(header, given)
            except ValueError as error:
                return ApiError(400, str(error), param=header)
        tenants.present.set(tenant)
        return None

    def _set_deadline(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        """Sets the deadline of this request. Lines of a batch have only that of the batch."""
        limit = None if IN_PROCESS in scope else self._max_timeout
        if (given := headers.get(b"x-request-timeout")) is not None:
            if not _SECONDS.fullmatch(given) or not float(given):
                message = "the header X-Request-Timeout must be a number of seconds above 0, such as 2.5"
                return ApiError(400, message, param="X-Request-Timeout")
            limit = float(given) if limit is None else min(limit, float(given))
        deadline.set(None if limit is None else request_context(scope).started + limit)
        return None

    def _limited(self, scope: Scope, receive: Receive, place: BodyPlace | None) -> Receive:
        """Limits a body as it arrives, perhaps without a Content-Length. place: None: it needs no room."""
        limit = self._body_limit(scope["path"])
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413, _too_large(limit))
            if place is not None:
                place.grow(size)
            return message

        return limited

    def _body_limit(self, path: str) -> int:
        return self._body_limits.get(path, MAX_BODY_BYTES)

    def _is_let_in(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Returns whether a request needs no key or has a valid one. Lines of a batch were admitted with the batch."""
        is_open = scope["method"] in ("GET", "HEAD") and self._needs_no_key(scope["path"])
        if self._door.is_open or is_open or IN_PROCESS in scope:
            return True
        caller.set(self._door.find([bearer(headers.get(b"authorization", b"")), headers.get(b"x-api-key", b"")]))
        return caller.get() is not None

    def _admit(self, scope: Scope, held: ExitStack) -> ApiError | None:
        """Applies the limits of the key to a request that may compute."""
        if scope["method"] == "POST" and (key := caller.get()) is not None:
            try:
                held.enter_context(self._door.admit(key))
            except RpcError as error:
                return from_rpc(error)
        return None


def _client(scope: Scope) -> str:
    """Returns the name under which a body takes room. Lines of batches, which are asked again when there is none, leave
    some to the other requests of their tenant."""
    name = tenants.present.get().name
    return f"{name}/batches" if IN_PROCESS in scope else name


def _no_room(place: BodyPlace, size: int) -> ApiError | None:
    try:
        place.grow(size)
    except ApiError as error:
        return error
    return None


def _content_length(headers: Mapping[bytes, bytes]) -> int:
    """Returns the length of the body; 0 if it is unknown."""
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) < _LENGTH_DIGITS else 0


def _too_large(limit: int) -> str:
    return f"the body is larger than {limit} bytes; send less, or several requests"


def _sender(context: RequestContext, send: Send, shutdown: GracefulShutdown) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            context.status = message["status"]
            request_id = context.request_id.encode()
            message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            if (header := context.dialect.request_id_header) is not None:
                message["headers"].append((header, request_id))
            if shutdown.announced:
                message["headers"].append((b"connection", b"close"))  # the next request goes to another gateway
        await send(message)

    return sender


# Finding a series takes the library's lock and checks every label.
@lru_cache(256)
def _answered(method: str, path: str, status: int) -> Counter:
    return metrics.HTTP_REQUESTS.labels(method, path, str(status))


def _shown(path: str) -> str:
    """Returns a path as the log shows it: a line of it is the client's to fill, whether it has a key or not."""
    return quote(path) if len(path) <= _SHOWN else f"{quote(path[:_SHOWN])}..."


def _record(scope: Scope, context: RequestContext, quiet: bool) -> None:
    route: Any = scope.get("route")
    # Paths without a route would make one time series each.
    path = getattr(route, "path", "unknown")
    status = context.status or CLIENT_GONE
    if quiet:
        metrics.HTTP_PROBES.labels(path, str(status)).inc()
        return
    _answered(scope["method"], path, status).inc()
    metrics.HTTP_DURATION.labels(scope["method"], path).observe(context.elapsed)
    logger.info(
        "%s %s %d %.3fs%s", scope["method"], _shown(scope["path"]), status, context.elapsed, context.note,
        extra={"request_id": context.request_id, "trace_id": context.trace_id},
    )  # fmt: skip
