"""Routes that change the service for all clients."""

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import Response

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.request_context import IN_PROCESS
from pagewire.wire.addresses import is_loopback
from pagewire.wire.keys import caller

NO_KEY = (
    "this route changes the service for all clients and needs a key: set --api-key or --api-key-file, or serve on"
    " loopback and call it as 127.0.0.1 or localhost"
)
WRONG_KEY = "this key may not change the service: use the key of --api-key, or one of `pagewire keys add --admin`"

_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]+)?")  # a name or an address, and a port


def _is_private(request: Request) -> bool:
    """Returns whether a request comes from this machine and names it as loopback.

    A page from elsewhere in a local browser, with a host name that resolves to this machine, sends that name; one that
    --allowed-origins lets read the answers sends its origin. One that shows a route as an image sends neither, but
    browsers add from where it came.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    # Not from request.url, which has the server's own address if it cannot parse the Host header.
    named = [request.headers.get("host", "")]
    if (origin := request.headers.get("origin")) is not None:
        named.append(origin.partition("://")[2])
    hosts = [_HOST.fullmatch(name) for name in named]
    return bool(request.app.state.is_private) and all(
        host is not None and is_loopback((host[1] or host[2]).lower()) for host in hosts
    )


class AdminRoute(JsonRoute):
    """A route that needs an admin key; without keys, a port that only this machine reaches."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            key = caller.get()
            may = _is_private(request) if key is None else key.admin
            if not may or IN_PROCESS in request.scope:
                raise ApiError(403, NO_KEY if key is None else WRONG_KEY, code="not_permitted")
            return await handle(request)

        return guarded
