"""A small HTTP/1.1 client for streamed answers, on plain asyncio: the load generator must not become the load."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from pagewire.wire.tls import NO_FILES, Files, client_context

# The longest line of a response head or of a server-sent event.
LINE_LIMIT = 4 * 1024 * 1024
# The key, among the headers, of the words after the status.
_REASON = ":reason"


class HttpError(Exception):
    """An unexpected answer: another status, or None if it is not HTTP."""

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        """retry_after: seconds after which the server asks for a retry."""
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds in the headers of an answer, with names in lower case: `retry-after-ms`, as OpenAI's and
    Anthropic's clients read it, or `retry-after` in seconds or as a date (RFC 9110). None without them."""
    milliseconds, value = headers.get("retry-after-ms", ""), headers.get("retry-after", "")
    if milliseconds.isdecimal():
        return int(milliseconds) / 1000
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


class Connection:
    """One keep-alive connection, opened by its first request; one request at a time.

    After an error, or an answer that was not read to its end, it must be closed; the next request opens it again.
    """

    def __init__(self, base_url: str, headers: dict[str, str], files: Files = NO_FILES) -> None:
        """files: for https. Raises ValueError for an invalid URL, StartupError for files that cannot be used."""
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"expected http://host:port, got {base_url!r}")
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = client_context(files) if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/")
        lines = [f"{name}: {value}\r\n" for name, value in {"Host": url.netloc, **headers}.items()]
        self._headers = "".join(lines)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """POSTs the body, and yields the JSON of every server-sent event until [DONE]. Raises HttpError and OSError."""
        async for line in self._lines("POST", path, body):
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data != b"[DONE]":
                    yield json.loads(data)

    async def json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the JSON of a whole answer."""
        return json.loads(b"".join([line async for line in self._lines(method, path, body)]))

    async def exchange(self, method: str, path: str, content: bytes | None) -> tuple[int, dict[str, str], bytes]:
        """Sends JSON, and returns (status, headers, body) of the answer, for any status.

        Raises HttpError if the answer is not HTTP, OSError and EOFError.
        """
        status, head = await self._send(method, path, content)
        body = b"".join([piece async for piece in self._body(head)])
        self._close_unless_kept(head)
        return status, head, body

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _lines(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[bytes]:
        head = await self._request(method, path, body)
        rest = b""
        async for piece in self._body(head):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest
        self._close_unless_kept(head)

    def _close_unless_kept(self, head: dict[str, str]) -> None:
        if head.get("connection", "").lower() == "close" or not _has_end(head):
            self.close()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, str]:
        """Sends a request and reads the head of its answer. Raises HttpError for a status other than 200."""
        status, head = await self._send(method, path, None if body is None else json.dumps(body).encode())
        if status != 200:
            text = b"".join([piece async for piece in self._body(head)]).decode("utf-8", "replace")
            message = f"HTTP {status} {head[_REASON]}: {text.strip()[:200]}"
            raise HttpError(message, status, retry_after(head))
        return head

    async def _send(self, method: str, path: str, content: bytes | None) -> tuple[int, dict[str, str]]:
        """Sends a request, and returns the status and the headers of its answer, with names in lower case."""
        if self._reader is not None and self._reader.at_eof():
            self.close()  # the server gave up on the idle connection
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=LINE_LIMIT
            )
        assert self._reader is not None
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(content or b'')}\r\n"
        if content is not None:
            head += "Content-Type: application/json\r\n"
        self._writer.write(head.encode() + b"\r\n" + (content or b""))
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = answer[0].split(" ", 2)
        if len(status) < 2 or not status[0].startswith("HTTP/1.") or not status[1].isdecimal():
            raise HttpError(f"not an HTTP answer: {answer[0][:80]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in answer[1:])}
        return int(status[1]), headers | {_REASON: " ".join(status[2:])}

    async def _body(self, head: dict[str, str]) -> AsyncIterator[bytes]:
        reader = self._reader
        assert reader is not None
        if head.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            while (await reader.readuntil(b"\r\n")) != b"\r\n":
                pass  # trailers
        elif "content-length" in head:
            yield await reader.readexactly(int(head["content-length"]))
        else:
            while piece := await reader.read(1 << 16):
                yield piece


def _has_end(head: dict[str, str]) -> bool:
    return "content-length" in head or head.get("transfer-encoding", "").lower() == "chunked"
