"""From declared responses to bytes: JSON bodies and server-sent events."""

from collections.abc import Callable, Mapping

import msgspec
from starlette.responses import Response

from pagewire.gateway.schema.responses import Body

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Reverse proxies that buffer would turn a stream into one late lump.
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"

encode: Callable[[object], bytes] = msgspec.json.Encoder().encode


def json_response(body: Body, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status_code=status, headers=headers, media_type="application/json")


def event(data: Body) -> bytes:
    """A server-sent event that carries `data`."""
    return b"".join((b"data: ", encode(data), b"\n\n"))
