"""A server that answers the lines of a batch over HTTP."""

import asyncio
import json

from pagewire.batch.lines import Line
from pagewire.batch.results import Answer
from pagewire.batch.runner import Away
from pagewire.errors import StartupError
from pagewire.tools.bench.http import Connection, HttpError, retry_after
from pagewire.tools.client_config import KEY_HINT
from pagewire.wire.tls import NO_FILES, Files, failed_handshake


class HttpServer:
    """Keeps as many connections as requests in flight."""

    def __init__(self, url: str, api_key: str | None, files: Files = NO_FILES) -> None:
        """url: with or without /v1 at its end. files: for https. Raises StartupError for an invalid URL."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._files = files
        self._idle: list[Connection] = []
        try:
            self._connection().close()
        except ValueError as error:
            raise StartupError(f"--url: {error}") from None

    async def models(self) -> list[str]:
        """Returns the served names. Raises StartupError if the server does not list them."""
        try:
            status, _, body = await self._exchange("GET", "/v1/models", None)
            if status == 200:
                return [model["id"] for model in json.loads(body)["data"]]
        except Away as error:
            hint = failed_handshake(str(error)) or "start a server with `pagewire serve`, or set another with --url"
            raise StartupError(f"nothing answers at {self._url} ({error}): {hint}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StartupError(f"{self._url} is not an OpenAI-compatible server: /v1/models lists no models") from error
        if status == 401:
            raise StartupError(f"{self._url} asks for a key: {KEY_HINT}")
        raise StartupError(f"{self._url} answers /v1/models with {status}: {body[:200].decode('utf-8', 'replace')}")

    async def ask(self, line: Line) -> Answer:
        """Raises Away."""
        status, headers, body = await self._exchange("POST", line.url, json.dumps(line.body).encode())
        return Answer(status, body, headers.get("x-request-id", ""), retry_after(headers) or 0.0)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _connection(self) -> Connection:
        return Connection(self._url, self._headers, self._files)

    async def _exchange(self, method: str, path: str, content: bytes | None) -> tuple[int, dict[str, str], bytes]:
        connection = self._idle.pop() if self._idle else self._connection()
        try:
            answer = await connection.exchange(method, path, content)
        except (OSError, EOFError, ValueError, HttpError, asyncio.LimitOverrunError) as error:
            connection.close()
            raise Away(str(error)) from error
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer
