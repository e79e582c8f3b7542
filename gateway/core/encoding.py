"""Encoding of answers: JSON bodies and server-sent events."""

from collections.abc import Callable, Mapping

import msgspec
from starlette.responses import Response

from pagewire.gateway.core.body import Body

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Reverse proxies that buffer would deliver a stream in one piece.
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"

# Valid in JSON, but many clients split events and lines of files at them, as str.splitlines() does.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode


def encode(data: object) -> bytes:
    """Returns JSON without any character that a client may take for the end of a line."""
    encoded = _encode(data)
    if not encoded.isascii():
        for end, escaped in _LINE_ENDS.items():
            encoded = encoded.replace(end, escaped)
    return encoded


def json_response(body: Body, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status_code=status, headers=headers, media_type="application/json")


def event(data: Body) -> bytes:
    """A server-sent event that carries `data`."""
    return b"".join((b"data: ", encode(data), b"\n\n"))
