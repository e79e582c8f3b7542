"""Requests to this gateway's own application, which treats them like those of HTTP clients."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message

from pagewire.batch.results import Answer
from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.request_context import IN_PROCESS
from pagewire.wire.tenants import Tenant


class InProcess:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: Mapping[str, Any], request_id: str, tenant: Tenant) -> Answer:
        """Returns the answer, with any status. If the call is cancelled, the request is aborted."""
        try:
            content = json.dumps(body, ensure_ascii=False).encode()  # NaN as it was read, for the route to refuse
        except (RecursionError, UnicodeEncodeError) as error:  # it can be read, and not be written
            return Answer(400, encode({"error": {"message": f"the body cannot be read: {error}"}}), request_id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"x-request-id", request_id.encode()),
        ]
        scope = {
            "type": "http",
            IN_PROCESS: tenant,
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
        }
        unread: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
        status, answer_headers, pieces = 500, dict[bytes, bytes](), list[bytes]()

        async def receive() -> Message:
            # After the body, the client stays connected.
            return unread.pop() if unread else await asyncio.Future()

        async def send(message: Message) -> None:
            nonlocal status, answer_headers
            if message["type"] == "http.response.start":
                status, answer_headers = message["status"], dict(message["headers"])
            else:
                pieces.append(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        except Exception:  # the application has logged it
            return Answer(500, b'{"error": {"message": "internal error; see the gateway\'s log"}}', request_id)
        return Answer(
            status,
            b"".join(pieces),
            answer_headers.get(b"x-request-id", b"").decode("latin-1"),
            float(answer_headers.get(b"retry-after", b"0")),
        )
