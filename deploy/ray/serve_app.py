"""Ray Serve in front of a stack: its HTTP proxies hand requests to the REST API, for clusters that have one way in.

    pagewire serve --port 8080 --distributed-executor-backend ray --data-parallel-size 2
    serve run deploy.ray.serve_app:app url=http://127.0.0.1:8080

Then port 8000 of Ray Serve answers as the stack does. Where the proxies run on other nodes, give the stack's REST an
address that they reach (`--host`) and a key. Takes `pip install 'ray[serve]' httpx`.
"""

from collections.abc import AsyncIterator, Iterable

import httpx
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

# The limit of one connection, not of the request.
_OF_ONE_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "te", "trailer", "upgrade"}


@serve.deployment(max_ongoing_requests=1000)
class Pagewire:
    """Passes requests on as they are, and answers as they come."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None))

    async def __call__(self, request: Request) -> Response:
        headers = _passed(request.headers.items())
        path = httpx.URL(path=request.url.path, query=request.url.query.encode())
        sent = self._client.build_request(request.method, path, headers=headers, content=await request.body())
        try:
            answer = await self._client.send(sent, stream=True)
        except httpx.ConnectError as error:
            message = f"no stack answers at {self._client.base_url}: {error}\n"
            return PlainTextResponse(message, 503, {"retry-after": "2"})

        async def body() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        return StreamingResponse(body(), answer.status_code, dict(_passed(answer.headers.items())))


def _passed(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_HOP]


def app(arguments: dict[str, str]) -> Application:
    """Builds the application from the arguments of `serve run`, `url=...`."""
    return Pagewire.bind(arguments.get("url", "http://127.0.0.1:8080"))
