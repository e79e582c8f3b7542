"""Cross-origin requests: which pages of other origins browsers let read the answers (CORS)."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.config import GatewayConfig
from pagewire.config.values import gateway as values

Headers = list[tuple[bytes, bytes]]

_ANY = "*"
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
# Pages may read these, and those of the standard.
_EXPOSED = b"x-request-id, request-id, retry-after, retry-after-ms, x-weights-version"
_MAX_AGE_S = b"600"


@dataclass(frozen=True)
class Cors:
    """The rules for pages of other origins. Browsers apply them; other clients are not affected."""

    origins: Collection[str]  # as browsers write them, or "*"
    methods: Collection[str]
    headers: Collection[str]  # in lower case, or "*"
    allows_credentials: bool

    @classmethod
    def of(cls, config: GatewayConfig) -> "Cors | None":
        """Returns None without --allowed-origins. Raises StartupError."""
        if not (origins := values.origins(config.allowed_origins)):
            return None
        methods = values.names("--allowed-methods", config.allowed_methods)
        headers = values.names("--allowed-headers", config.allowed_headers)
        return cls(origins, methods, [header.lower() for header in headers], config.allow_credentials)

    def of_answer(self, request: Iterable[tuple[bytes, bytes]]) -> Headers:
        """Returns the headers to add to the answer. request: the headers of the request."""
        origin = dict(request).get(b"origin")
        # A cache must not answer one origin with what was meant for another.
        vary: Headers = [] if self._is_open else [(b"vary", b"Origin")]
        if origin is None or not self._allows(origin):
            return vary
        return [*vary, *self._allowed(origin), (b"access-control-expose-headers", _EXPOSED)]

    def of_preflight(self, request: Iterable[tuple[bytes, bytes]]) -> tuple[Headers, str]:
        """Returns the headers of the answer, and why the request that is announced is not allowed: "" if it is."""
        asked = dict(request)
        origin, method = asked[b"origin"], asked[b"access-control-request-method"].decode("latin-1")
        wanted = asked.get(b"access-control-request-headers", b"").decode("latin-1")
        vary = (b"vary", b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers")
        if not self._allows(origin):
            return [vary], f"origin {origin.decode('latin-1')!r:.200} is not allowed (--allowed-origins)"
        if method not in self._methods:
            return [vary, *self._allowed(origin)], f"method {method!r:.200} is not allowed (--allowed-methods)"
        names = [name for name in (one.strip().lower() for one in wanted.split(",")) if name]
        if _ANY not in self.headers and (refused := [name for name in names if name not in self.headers]):
            return [vary, *self._allowed(origin)], f"header {refused[0]!r:.200} is not allowed (--allowed-headers)"
        return [
            vary,
            *self._allowed(origin),
            (b"access-control-allow-methods", ", ".join(self._methods).encode()),
            # Named, as * would not stand for Authorization, nor for anything beside credentials.
            *([(b"access-control-allow-headers", ", ".join(names).encode("latin-1"))] if names else []),
            (b"access-control-max-age", _MAX_AGE_S),
        ], ""

    @property
    def _methods(self) -> Collection[str]:
        return _METHODS if _ANY in self.methods else self.methods

    @property
    def _is_open(self) -> bool:
        """Whether every answer names the same origin: beside credentials, browsers do not take *."""
        return _ANY in self.origins and not self.allows_credentials

    def _allows(self, origin: bytes) -> bool:
        return _ANY in self.origins or origin.decode("latin-1") in self.origins

    def _allowed(self, origin: bytes) -> Headers:
        credentials: Headers = [(b"access-control-allow-credentials", b"true")] if self.allows_credentials else []
        return [(b"access-control-allow-origin", b"*" if self._is_open else origin), *credentials]


class CorsMiddleware:
    """Answers preflights, which carry no API key, and adds headers to every other answer, refusals included."""

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app, self._cors = app, cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request: Headers = scope["headers"]
        names = {name for name, _ in request}
        if scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names:
            await _answer_preflight(*self._cors.of_preflight(request), send)
            return
        added = self._cors.of_answer(request)

        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, sender if added else send)


async def _answer_preflight(headers: Headers, refusal: str, send: Send) -> None:
    body = f"CORS: {refusal}\n".encode() if refusal else b""
    more = [(b"content-type", b"text/plain; charset=utf-8")] if refusal else []
    more.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 400 if refusal else 200, "headers": [*headers, *more]})
    await send({"type": "http.response.body", "body": body})
