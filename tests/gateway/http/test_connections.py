"""Connections that send too little, read too little or are too many, over plain sockets."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client import REGISTRY

from pagewire.gateway.http import http_connection
from pagewire.gateway.http.connection_limits import Limits
from pagewire.process import process
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.gateway.generation.test_streams import lazy_client

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@dataclass
class Raw:
    """One connection, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, text: str) -> None:
        self.writer.write(text.encode("latin-1"))
        await self.writer.drain()

    async def rest(self) -> str:
        """All that comes until the gateway closes the connection."""
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                return (await self.reader.read()).decode()
        return ""

    async def head(self) -> str:
        async with asyncio.timeout(10):
            return (await self.reader.readuntil(b"\r\n\r\n")).decode()


@asynccontextmanager
async def connected(client: httpx.AsyncClient) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def closed(reason: str) -> float:
    return REGISTRY.get_sample_value("pagewire:http_connections_closed_total", {"reason": reason}) or 0


def is_open(phase: str) -> float:
    return REGISTRY.get_sample_value("pagewire:http_connections", {"phase": phase}) or 0


def completion(**fields: object) -> str:
    body = json.dumps({"prompt": "p", **fields})
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}"


# What comes too slowly.


async def test_slow_headers_are_given_up(fake: FakeTokenizer, address: str) -> None:
    """However often a byte comes: what counts is when the headers end."""
    async with (
        running_gateway(address, limits=Limits(head_s=0.3)) as client,
        connected(client) as slow,
        connected(client) as silent,
    ):
        before = closed("head_timeout")

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                await slow.send("GET /v1/models HTTP/1.1\r\nX-Slow: ")
                while True:
                    await slow.send("a")
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        await silent.send("GET /v1/models HTTP/1.1\r\n")
        answer = await silent.rest()
        assert answer.startswith("HTTP/1.1 408 ")
        assert "within 0.3 s" in answer
        # A client that still sends when the connection closes may lose the answer to the reset.
        await slow.rest()
        trickling.cancel()
        assert closed("head_timeout") == before + 2


async def test_slow_bodies_are_given_up_and_steady_ones_are_not(fake: FakeTokenizer, address: str) -> None:
    limits = Limits(body_s=0.4, body_bytes_per_s=5)
    async with (
        running_gateway(address, limits=limits) as client,
        connected(client) as slow,
        connected(client) as steady,
    ):
        await wait_ready(client)
        request = completion(max_tokens=4)
        cut = len(request) - 30
        await slow.send(request[:cut])
        await steady.send(request[:cut])
        for byte in request[cut:]:  # 30 bytes in 0.9 s: more than 5 per second, and longer than 0.4 s
            await asyncio.sleep(0.03)
            await steady.send(byte)
        assert (await steady.head()).startswith("HTTP/1.1 200 ")
        answer = await slow.rest()
        assert answer.startswith("HTTP/1.1 408 ")
        assert "5 bytes per second" in answer


async def test_a_body_that_was_answered_before_it_came_is_not_waited_for(fake: FakeTokenizer, address: str) -> None:
    limits = Limits(body_s=0.3)
    async with running_gateway(address, api_key="k", limits=limits) as client, connected(client) as refused:
        await refused.send(f"{HEAD}Content-Length: 1000000\r\n\r\n")
        assert (await refused.head()).startswith("HTTP/1.1 401 ")
        await refused.send("{")
        assert "HTTP/1.1" not in await refused.rest()  # the one answer, then the end


async def test_idle_connections_are_closed_and_busy_ones_are_not(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, limits=Limits(idle_s=0.2)) as client:
        await wait_ready(client)
        async with connected(client) as fresh, connected(client) as used, connected(client) as busy:
            fake.running.clear()
            await busy.send(completion(max_tokens=4))
            await used.send("GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await used.head()).startswith("HTTP/1.1 200 ")
            await used.rest()
            assert await fresh.rest() == ""
            fake.running.set()
            assert (await busy.head()).startswith("HTTP/1.1 200 ")


async def test_a_reader_that_is_too_slow_is_cut_off(fake: FakeTokenizer, address: str) -> None:
    """One that takes a few bytes now and then: to the kernel that may be progress."""
    before = closed("unread")
    async with (
        running_gateway(address, send_buffer=16 * 1024, limits=Limits(unread_s=0.4)) as client,
        lazy_client(fake, client) as slow,
    ):
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                while closed("unread") == before:
                    await asyncio.get_running_loop().sock_recv(slow, 10)
                    await asyncio.sleep(0.02)
        await eventually(lambda: not fake.live)


# Too many.


async def test_new_clients_are_served_while_idle_ones_fill_the_bound(fake: FakeTokenizer, address: str) -> None:
    """The connection that was idle longest is closed; a running stream continues."""
    async with running_gateway(address, limits=Limits(connections=5, reserve=2)) as client:
        await wait_ready(client)
        async with contextlib.AsyncExitStack() as stack:
            fake.running.clear()
            stream = await stack.enter_async_context(connected(client))
            await stream.send(completion(max_tokens=30, stream=True, seed=1))
            await eventually(lambda: fake.live)
            idle = [await stack.enter_async_context(connected(client)) for _ in range(20)]
            for one in idle[:10]:
                assert await one.rest() == ""
            async with httpx.AsyncClient(base_url=client.base_url) as newcomer:
                assert (await newcomer.get("/version")).status_code == 200
            fake.running.set()
            text = ""
            async with asyncio.timeout(10):
                while "[DONE]" not in text:
                    text += (await stream.reader.read(1 << 16)).decode()
            tokens = [json.loads(line[6:])["choices"] for line in text.splitlines() if line.startswith("data: {")]
            assert "".join(choices[0]["text"] for choices in tokens if choices) == expected_text("p", 1, 30)


async def test_heads_that_never_end_make_room_too(fake: FakeTokenizer, address: str) -> None:
    limits = Limits(connections=3, reserve=2, new_s=0.0)
    async with running_gateway(address, limits=limits) as client, contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(connected(client)) for _ in range(3)]
        for one in slow:
            await one.send("GET / HT")
        await eventually(lambda: is_open("head") == 3)
        assert (await client.get("/version")).status_code == 200
        assert await slow[0].rest() == ""


async def test_full_of_streams_the_gateway_refuses_but_answers_probes(
    fake: FakeTokenizer, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(connections=2, reserve=2, log_every_s=0.0, idle_s=4)
    async with running_gateway(address, limits=limits) as client:
        await wait_ready(client)
        await client.aclose()
        fake.running.clear()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                stream = await stack.enter_async_context(connected(client))
                await stream.send(completion(max_tokens=30, stream=True))
            await eventually(lambda: is_open("answer") == 2 and len(fake.live) == 2)
            async with httpx.AsyncClient(base_url=client.base_url) as late:
                assert (await late.get("/health")).status_code == 200
                assert "pagewire:http_connections" in (await late.get("/metrics")).text
                refused = await late.post("/v1/completions", json={"prompt": "p"})
                assert refused.status_code == 503
                assert "too many connections" in refused.json()["error"]["message"]
                assert refused.headers["retry-after"]
                assert refused.headers["connection"] == "close"
            for number in (1, 2):
                slow = await stack.enter_async_context(connected(client))
                await slow.send("GET / HT")
                await eventually(lambda number=number: is_open("head") == number)
            beyond = await stack.enter_async_context(connected(client))
            assert await beyond.rest() == ""
            await eventually(lambda: any("1 refused" in record.getMessage() for record in caplog.records))
            fake.running.set()


def test_the_bound_follows_from_the_descriptors() -> None:
    """The process raises its limit of descriptors as far as allowed."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 512))\n"
        "from pagewire.gateway.http.connection_limits import Limits\n"
        "limits = Limits.of_this_process()\n"
        "print(limits.connections, limits.reserve, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    connections, reserve, soft = map(int, finished.stdout.split())
    assert soft == 512
    assert 300 < connections < 384
    assert connections + reserve < 512 - 50
    assert process.open_descriptors() > 2


# Too much.


@pytest.mark.parametrize("whole", [True, False])
async def test_headers_have_a_size(client: httpx.AsyncClient, whole: bool) -> None:
    async with connected(client) as raw:
        await raw.send("GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + "a" * 70_000 + "\r\n\r\n" * whole)
        answer = await raw.rest()
        assert answer.startswith("HTTP/1.1 431 ")
        assert "65536 bytes" in answer
    assert (await client.get("/version", headers={"x-long": "a" * 60_000})).status_code == 200


async def test_white_space_around_a_value_is_no_part_of_it(client: httpx.AsyncClient) -> None:
    async with connected(client) as raw:
        await raw.send("GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Timeout: \t 5 \t \r\nX-Request-Id: mine \r\n\r\n")
        head = await raw.head()
    assert head.startswith("HTTP/1.1 200 ") and "x-request-id: mine\r\n" in head.lower()


async def test_few_requests_are_sent_ahead_of_their_answers(client: httpx.AsyncClient) -> None:
    async with connected(client) as raw:
        await raw.send("GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        for _ in range(20):
            assert (await raw.head()).startswith("HTTP/1.1 200 ")
            await raw.reader.readuntil(b"}")
        await raw.send("GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        assert (await raw.rest()).count("HTTP/1.1 200 ") < 100


async def sent(
    client: httpx.AsyncClient, body: bytes, times: int = 1
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a completion's request so many times, and nothing else."""
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(times * (head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)))
    return reader, writer


async def test_a_client_that_ends_its_side_gets_its_answer(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.running.clear()
    reader, writer = await sent(client, b'{"prompt": "half", "max_tokens": 3}')
    writer.write_eof()
    await eventually(lambda: len(fake.live) == 1)
    for _ in range(2):
        assert b"HTTP/1.1 100 Continue" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    fake.running.set()
    answer = await asyncio.wait_for(reader.read(), 20)
    assert b"HTTP/1.1 200 OK" in answer and b"connection: close" in answer
    writer.close()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_client_that_has_sent_requests_ahead_and_is_gone_leaves_nothing_running(
    client: httpx.AsyncClient,
    fake: FakeTokenizer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    stream: bytes,
    later: bool,
) -> None:
    monkeypatch.setattr(http_connection, "_LOOK_S", 0.1)
    monkeypatch.setattr(http_connection, "_PROBES", (0.01, 0.1))
    fake.steps_left = 0
    body = b'{"prompt": "gone", "max_tokens": 40, "stream": %s}' % stream
    _, writer = await sent(client, body, times=5)
    await eventually(lambda: fake.live)
    if later:
        writer.write_eof()
        await asyncio.sleep(0.5)
    writer.close()
    await eventually(lambda: not fake.live)
    fake.steps_left = None
    await asyncio.sleep(0.1)
    assert not fake.live and len(fake.received) == 1 and "Exception" not in caplog.text


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_all_requests_that_a_client_has_sent_before_it_ends_its_side_are_answered(
    client: httpx.AsyncClient, fake: FakeTokenizer, stream: bytes
) -> None:
    fake.step_s = 0.01
    body = b'{"prompt": "half", "max_tokens": 10, "stream": %s}' % stream
    reader, writer = await sent(client, body, times=5)
    writer.write_eof()
    answers = await asyncio.wait_for(reader.read(), 20)
    assert answers.count(b"HTTP/1.1 200 OK") == len(fake.received) == 5
    writer.close()


async def test_an_old_client_that_ends_its_side_gets_what_is_not_computed(client: httpx.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
    writer.write_eof()
    assert b" 200 OK" in await asyncio.wait_for(reader.read(), 20)
    writer.close()


async def test_a_stream_whose_client_ends_its_side_goes_on(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.steps_left = 3
    reader, writer = await sent(client, b'{"prompt": "half", "max_tokens": 40, "stream": true}')
    await asyncio.wait_for(reader.readuntil(b"data: "), 20)
    writer.write_eof()
    await asyncio.wait_for(reader.readuntil(b"\r\n3\r\n:\n\n\r\n"), 20)
    fake.steps_left = None
    assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


async def test_a_stream_whose_client_is_gone_ends(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.steps_left = 3
    reader, writer = await sent(client, b'{"prompt": "gone", "max_tokens": 40, "stream": true}')
    await asyncio.wait_for(reader.readuntil(b"data: "), 20)
    await eventually(lambda: fake.steps_left == 0)
    with contextlib.suppress(TimeoutError):  # with unread bytes, its system would reset the connection
        while await asyncio.wait_for(reader.read(1 << 20), 0.2):
            pass
    writer.close()
    await eventually(lambda: not fake.live)


async def test_a_client_that_is_gone_leaves_nothing_running(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.running.clear()
    with contextlib.suppress(httpx.ReadTimeout):
        await client.post("/v1/completions", json={"prompt": "gone", "max_tokens": 3}, timeout=0.2)
    await eventually(lambda: not fake.live)
