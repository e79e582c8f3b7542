"""Routes of Ollama's API: a body is JSON whatever its content type says, as Ollama's clients need not say it."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import Response

from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.operation.admin.route import AdminRoute

# A page of another site can send a body without a content type, but not without these.
_OF_BROWSERS = ("origin", "sec-fetch-site")


class OllamaRoute(JsonRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_as_json(request: Request) -> Response:
            if not any(name in request.headers for name in _OF_BROWSERS):
                others = [(key, value) for key, value in request.scope["headers"] if key != b"content-type"]
                headers = [*others, (b"content-type", b"application/json")]
                request = Request({**request.scope, "headers": headers}, request.receive)
            return await handle(request)

        return read_as_json


class OllamaAdminRoute(AdminRoute, OllamaRoute):
    """A route that changes what is on the server's disk."""
