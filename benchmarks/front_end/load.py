"""The load: connections that send one request after the other and only count what comes back.

`python -m benchmarks.front_end.load PORT PATH BODY CONNECTIONS REQUESTS` prints {"wall": seconds, "events": server-sent
events, "bytes": of all answers}. It looks at as little as it can: it shares the machine with what is measured.
"""

import asyncio
import json
import sys
import time
from typing import cast

import uvloop

EVENT = b"data:"
LAST_CHUNK = b"\r\n0\r\n\r\n"


class Client(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, request: bytes, queue: list[int], done: asyncio.Future[None]) -> None:
        """queue: an entry for each request that is still to be sent, by any connection."""
        self._request = request
        self._queue = queue
        self._done = done
        self._head = b""
        self._left: int | None = None  # bytes of the body; None = chunked, or not known yet
        self._chunked = False
        self._end = b""  # last bytes of a chunked answer
        self.num_events = 0
        self.num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        if not self._queue:
            self._transport.close()
            self._done.set_result(None)
            return
        self._queue.pop()
        self._head, self._left, self._chunked, self._end = b"", None, False, b""
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self._left is None and not self._chunked:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            if b" 200 " not in head.partition(b"\r\n")[0]:
                self._done.set_exception(RuntimeError(f"{head!r} {data!r}"))
                self._transport.close()
                return
            self._chunked = b"transfer-encoding: chunked" in head.lower()
            if not self._chunked:
                self._left = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if self._chunked:
            self.num_events += data.count(EVENT)
            self._end = (self._end + data)[-len(LAST_CHUNK) :]
            if self._end == LAST_CHUNK:
                self._next()
        else:
            assert self._left is not None
            self._left -= len(data)
            if not self._left:
                self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))


async def drive(port: int, path: str, body: bytes, num_connections: int, num_requests: int) -> dict[str, float]:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    loop = asyncio.get_running_loop()
    queue, clients, ends = [0] * num_requests, [], []
    start = time.perf_counter()
    for _ in range(num_connections):
        done = loop.create_future()
        client = Client(request, queue, done)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        clients.append(client)
        ends.append(done)
    await asyncio.gather(*ends)
    wall = time.perf_counter() - start
    return {
        "wall": wall,
        "events": sum(client.num_events for client in clients),
        "bytes": sum(client.num_bytes for client in clients),
    }


if __name__ == "__main__":
    port, path, body, num_connections, num_requests = sys.argv[1:]
    print(json.dumps(uvloop.run(drive(int(port), path, body.encode(), int(num_connections), int(num_requests)))))
