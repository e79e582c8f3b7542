"""Requests that two servers may read in two ways, paths that point elsewhere, and what clients would have us log."""

import asyncio
import contextlib
import json
import logging
import sys

import httpx
import pytest

from pagewire.config import GatewayConfig
from pagewire.telemetry import logs
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.gateway.http.test_connections import HEAD, closed, connected

BODY = json.dumps({"prompt": "p", "max_tokens": 2})
CHUNKED = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
ENDS = "\r\n"
LENGTH = f"Content-Length: {len(BODY)}\r\n"
TE = "Transfer-Encoding: chunked\r\n"
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize(
    "request_text",
    [
        pytest.param(f"{HEAD}{LENGTH}{TE}\r\n{CHUNKED}", id="length and chunks"),
        pytest.param(f"{HEAD}{TE}{LENGTH}\r\n{CHUNKED}", id="chunks and length"),
        pytest.param(f"{HEAD}{LENGTH}Content-Length: 5\r\n\r\n{BODY}", id="two lengths"),
        pytest.param(f"{HEAD}{LENGTH}{LENGTH}\r\n{BODY}", id="one length twice"),
        pytest.param(f"{HEAD}Content-Length: {len(BODY)}, {len(BODY)}\r\n\r\n{BODY}", id="list of lengths"),
        pytest.param(f"{HEAD}Content-Length: +{len(BODY)}\r\n\r\n{BODY}", id="signed length"),
        pytest.param(f"{HEAD}Content-Length: {'9' * 30}\r\n\r\n{BODY}", id="endless length"),
        pytest.param(f"{HEAD}Transfer-Encoding: xchunked\r\n\r\n{CHUNKED}", id="unknown coding"),
        pytest.param(f"{HEAD}Transfer-Encoding: chunked, identity\r\n\r\n{CHUNKED}", id="chunked is not last"),
        pytest.param(f"{HEAD}{TE}{TE}\r\n{CHUNKED}", id="chunked twice"),
        pytest.param(f"{HEAD}Transfer-Encoding : chunked\r\n\r\n{CHUNKED}", id="space before colon"),
        pytest.param(f"{HEAD}Transfer-Encoding:\r\n chunked\r\n\r\n{CHUNKED}", id="folded coding"),
        pytest.param(f"{HEAD}X-A: b\r\n c\r\n{LENGTH}\r\n{BODY}", id="folded header"),
        pytest.param(f"{HEAD}X-A: b\n{LENGTH}\r\n{BODY}", id="bare line feed"),
        pytest.param(f"{HEAD}X-A: b\rX-B: c\r\n{LENGTH}\r\n{BODY}", id="bare carriage return"),
        pytest.param(f"{HEAD}X-A: b\0c\r\n{LENGTH}\r\n{BODY}", id="NUL"),
        pytest.param(f"{HEAD}{TE}\r\n{CHUNKED}".replace(f"{len(BODY):x}\r\n", f"{len(BODY):x}\n"), id="chunk, bare LF"),
        pytest.param(f"{HEAD}{TE}\r\n-1\r\n{BODY}\r\n0\r\n\r\n", id="negative chunk"),
        pytest.param(f"{HEAD}Host: y\r\n{LENGTH}\r\n{BODY}", id="two hosts"),
        pytest.param(f"{HEAD}Authorization: a\r\nauthorization: b\r\n{LENGTH}\r\n{BODY}", id="two keys"),
        pytest.param(f"{HEAD}X-Api-Key: a\r\nX-Api-Key: a\r\n{LENGTH}\r\n{BODY}", id="one key twice"),
        pytest.param(f"{HEAD}Content-Type: text/plain\r\n{LENGTH}\r\n{BODY}", id="two types"),
        pytest.param(f"{HEAD}{LENGTH}\r\n{BODY}".replace("Host: x\r\n", ""), id="no host"),
        pytest.param("GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x1b[31m\r\n\r\n", id="escape sequence"),
        pytest.param("\x16\x03\x01\x02\x00\x01\x00", id="TLS"),
    ],
)
async def test_what_can_be_read_in_two_ways_is_refused(
    client: httpx.AsyncClient, fake: FakeTokenizer, request_text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal ends the connection, whatever follows, and does not log a line for each request."""
    reason = "tls" if request_text.startswith("\x16") else "invalid"
    before = closed(reason)
    async with connected(client) as raw:
        await raw.send(f"{request_text}GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await raw.rest()
    assert answer.startswith("HTTP/1.1 400 ")
    assert answer.count("\r\n\r\n") == 1
    assert "connection: close" in answer
    assert closed(reason) == before + 1
    assert not fake.live
    assert "smuggled" not in caplog.text
    assert "Invalid HTTP request" not in caplog.text


async def test_nothing_follows_an_offer_of_another_protocol(client: httpx.AsyncClient) -> None:
    request = "GET /version HTTP/1.1\r\nHost: x\r\n"
    async with connected(client) as raw:
        await raw.send(f"{request}Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n{request}\r\n")
        answer = await raw.rest()
    assert answer.startswith("HTTP/1.1 200 ")
    assert "connection: close" in answer
    assert answer.count('{"version"') == 1


@pytest.mark.parametrize("pieces", [1, 1000])
async def test_trailers_are_dropped(fake: FakeTokenizer, address: str, pieces: int) -> None:
    """Trailers are dropped also where they come with the head: a proxy has checked the head alone."""
    trailers = "Authorization: Bearer right\r\nHost: y\r\nX-Request-Id: forged\r\n"
    for key, status in (("wrong", 401), ("right", 200)):
        head = f"{HEAD}Authorization: Bearer {key}\r\n{TE}Connection: close\r\n\r\n"
        request = f"{head}{CHUNKED.removesuffix(ENDS)}{trailers}{ENDS}"
        async with running_gateway(address, api_key="right") as client, connected(client) as raw:
            await wait_ready(client)
            for start in range(0, len(request), len(request) // pieces + 1):
                await raw.send(request[start : start + len(request) // pieces + 1])
            answer = await raw.rest()
        assert answer.startswith(f"HTTP/1.1 {status} ") and "forged" not in answer


@pytest.mark.parametrize("rest", ["0\r\nX: ", "1;x="])
async def test_what_does_not_end_between_two_parts_of_a_body_is_cut_off(client: httpx.AsyncClient, rest: str) -> None:
    """The parser would keep it, whether the client has a key or not."""
    async with connected(client) as raw:
        await raw.send(f"{HEAD}{TE}\r\n{rest}")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await raw.send("a" * 10_000)
                await asyncio.sleep(0.001)
        answer = await raw.rest()
    assert not answer or "bytes between two parts of the body" in answer
    assert (await client.get("/livez")).status_code == 200


async def test_a_length_has_a_bounded_number_of_digits(client: httpx.AsyncClient) -> None:
    async with connected(client) as raw:
        await raw.send(f"{HEAD}Content-Length: {len(BODY):05000}\r\nConnection: close\r\n\r\n{BODY}")
        assert (await raw.rest()).startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize("offer", ["Connection: Upgrade\r\nUpgrade: websocket\r\n", H2C])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("pieces", [1, 3, 1000])
async def test_a_body_behind_an_offer_of_another_protocol_is_read(
    client: httpx.AsyncClient, fake: FakeTokenizer, offer: str, is_chunked: bool, pieces: int
) -> None:
    """Java's HttpClient offers HTTP/2 with its first request."""
    body = f"{TE}\r\n{CHUNKED}" if is_chunked else f"{LENGTH}\r\n{BODY}"
    request = HEAD + offer + body
    size = max(1, -(-len(request) // pieces))
    async with connected(client) as raw:
        for start in range(0, len(request), size):
            await raw.send(request[start : start + size])
            await asyncio.sleep(0)
        answer = await raw.rest()
    assert answer.startswith("HTTP/1.1 200 ") and answer.count("HTTP/1.1") == 1
    assert len(fake.submissions) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/page/../routes.py",
        "/page/%2e%2e/routes.py",
        "/page/..%2froutes.py",
        "/page/..\\routes.py",
        "/page//etc/passwd",
        "/page/%2fetc/passwd",
        "/page/%00",
        "/page/index.html%00.js",
        "/page/",
        "/page/vendor",
        "/page/../v1/models",
        "/livez/../v1/models",
        "/page%2f..%2fv1/models",
        "//version",
        "/v1//models",
        "/health%00",
        "/v1/files/..%2fpagewire.db/content",
        "/v1/files/%00/content",
        "/v1/batches/%00",
        "/docs/../v1/models",
        "/v1/models/a%0d%0aX-Evil:%201",
    ],
)
async def test_paths_lead_nowhere_else(client: httpx.AsyncClient, path: str) -> None:
    async with connected(client) as raw:
        await raw.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head, _, body = (await raw.rest()).partition("\r\n\r\n")
    has_control = any(escape in path for escape in ("%00", "%0a"))
    assert head.startswith("HTTP/1.1 400 " if has_control else "HTTP/1.1 404 ")
    assert "evil" not in head.lower()
    assert json.loads(body)["error"]["type"] == ("invalid_request_error" if has_control else "not_found_error")


async def test_paths_beside_the_open_ones_need_the_key(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, api_key="k") as client:
        for path in ("/page/../v1/models", "/page/%2e%2e/v1/models", "/livez/../v1/models", "//page/x"):
            async with connected(client) as raw:
                await raw.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert (await raw.rest()).split()[1] in ("401", "404")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_clients_say_forges_no_line_of_the_log(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.setup("gateway", GatewayConfig(log_format=log_format))
        root.handlers[0].setStream(sys.stderr)  # type: ignore[attr-defined]
        logging.getLogger("pagewire.test").warning("no model %s", "a\n00:00:00 I gateway all is well\x1b[2J\r\x9b")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    written = capsys.readouterr().err
    assert "no model a" in written
    assert not any(line.startswith("00:00:00") for line in written.splitlines())
    assert "\x1b" not in written
    assert "\r" not in written
