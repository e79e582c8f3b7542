"""The end of a gateway's servers."""

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from pagewire.gateway import main
from pagewire.gateway.http.connection_limits import Limits
from pagewire.gateway.http.connections import Connections
from pagewire.wire.secure_rpc import NO_TLS

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_answers_that_do_not_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "LAST_WORDS_S", 0.1)
    begun, ended = asyncio.Event(), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    server = main._server(app, Connections(Limits.of_this_process()), NO_TLS)  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        idle = await asyncio.open_connection(*listening.getsockname())
        writer.write(REQUEST)
        await begun.wait()
        server.stop()
        async with asyncio.timeout(20):
            assert await idle[0].read() == b""
            await serving
            assert await reader.read() == b""
    assert ended == ["cancelled"]
    for one in (writer, idle[1]):
        one.close()
