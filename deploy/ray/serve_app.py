"""Ray Serve in front of a stack: its HTTP proxies hand requests to the REST API, for clusters that have one way in.

    pagewire serve --distributed-executor-backend ray --data-parallel-size 2
    serve run deploy.ray.serve_app:app

Then http://127.0.0.1:8000 of Ray Serve answers as the stack at PAGEWIRE_URL does; give that one another --port. Takes
`pip install 'ray[serve]' httpx`.
"""

import os
from collections.abc import AsyncIterator

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

URL = os.environ.get("PAGEWIRE_URL", "http://127.0.0.1:8080")
_OF_ONE_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "te", "trailer", "upgrade"}


@serve.deployment(max_ongoing_requests=1000)
class Pagewire:
    """Passes requests on as they are, and answers as they come."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(base_url=URL, timeout=None, limits=httpx.Limits(max_connections=None))

    async def __call__(self, request: Request) -> StreamingResponse:
        headers = {name: value for name, value in request.headers.items() if name not in _OF_ONE_HOP}
        path = httpx.URL(path=request.url.path, query=request.url.query.encode())
        sent = self._client.build_request(request.method, path, headers=headers, content=await request.body())
        answer = await self._client.send(sent, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        passed = {name: value for name, value in answer.headers.items() if name not in _OF_ONE_HOP}
        return StreamingResponse(body(), answer.status_code, passed)


app = Pagewire.bind()
