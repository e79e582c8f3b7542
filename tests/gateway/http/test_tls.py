"""REST with TLS: admission, and the limits of connections, which apply from the first byte of a handshake."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.errors import StartupError
from pagewire.gateway.http.connection_limits import Limits
from pagewire.tools.batch.http_server import HttpServer
from pagewire.wire import health, tls
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.gateway.http.test_connections import Raw, closed, completion, connected, is_open
from tests.gateway.operation.test_admin_port import free_port
from tests.makers.certificates import Authority, Issued


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def issued(ca: Authority) -> Issued:
    return ca.issue("gateway")


def client_context(issued: Issued, *, shows: Issued | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(issued.ca_certs))
    if shows is not None:
        context.load_cert_chain(shows.certfile, shows.keyfile)
    return context


@asynccontextmanager
async def running(address: str, issued: Issued, **overrides: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client that trusts the gateway's CA."""
    async with running_gateway(address, **issued.flags, **overrides) as plain:
        url = str(plain.base_url).replace("http://", "https://")
        async with httpx.AsyncClient(base_url=url, verify=client_context(issued), timeout=20) as client:
            yield client


@asynccontextmanager
async def connected_with_tls(client: httpx.AsyncClient, issued: Issued) -> AsyncIterator[Raw]:
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port, ssl=client_context(issued))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


async def test_everything_is_served_with_tls(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    admin_port = free_port()
    async with running(address, issued, admin_port=admin_port) as client:
        await wait_ready(client)
        assert (await client.get(f"https://127.0.0.1:{admin_port}/metrics")).status_code == 200
        answer = await client.post("/v1/completions", json={"prompt": "p", "seed": 1, "max_tokens": 8})
        assert answer.json()["choices"][0]["text"] == expected_text("p", 1, 8)
        async with client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as streamed:
            assert [line async for line in streamed.aiter_lines() if line][-1] == "data: [DONE]"
        stranger = httpx.AsyncClient(base_url=client.base_url, verify=ssl.create_default_context())
        async with stranger:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await stranger.get("/v1/models")


async def test_commands_take_https_and_say_what_is_missing(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    async with running(address, issued) as client:
        await wait_ready(client)
        with contextlib.closing(HttpServer(str(client.base_url), None, issued.files)) as server:
            assert await server.models() == ["fake", "alias"]
        with (
            contextlib.closing(HttpServer(str(client.base_url), None)) as server,
            pytest.raises(StartupError, match="set --ssl-ca-certs to its CA"),
        ):
            await server.models()
    async with running_gateway(address) as plain:
        url = str(plain.base_url).replace("http://", "https://")
        with (
            contextlib.closing(HttpServer(url, None, issued.files)) as server,
            pytest.raises(StartupError, match="it does not use TLS"),
        ):
            await server.models()


async def test_a_client_without_tls_gets_an_error(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    before = closed("plain_text")
    async with running(address, issued) as client, connected(client) as plain:
        await plain.send("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await plain.rest()
        assert answer.startswith("HTTP/1.1 400 ")
        assert "this port speaks TLS: use https:// instead of http://" in answer
        assert closed("plain_text") == before + 1


async def test_the_log_names_clients_of_the_wrong_protocol(
    fake: FakeTokenizer, address: str, issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(log_every_s=0, head_s=0.1)
    async with running(address, issued, limits=limits) as client, connected(client) as plain:
        await plain.send("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: "plain_text: clients speak HTTP to a port with TLS: use https://" in caplog.text)
    async with running_gateway(address, limits=limits) as without:
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection(
                without.base_url.host, without.base_url.port, ssl=client_context(issued), server_hostname="localhost"
            )
        await eventually(lambda: "tls: clients speak TLS to a port without it: use http://" in caplog.text)
    assert "ulimit" not in caplog.text and "1 tls" in caplog.text


async def test_a_certificate_is_wanted_of_all_but_probes(
    fake: FakeTokenizer, address: str, issued: Issued, ca: Authority, tmp_path: Path
) -> None:
    """Probes of orchestrators have none to show."""
    stranger = Authority(tmp_path, "other-ca").issue("stranger")
    async with running(address, issued, ssl_cert_reqs=2) as client:
        await wait_ready(client)
        for path in ("/v1/models", "/metrics", "/", "/docs"):
            answer = await client.get(path)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "client_certificate_required"
        for shown, is_taken in ((ca.issue("client", purposes="clientAuth"), True), (stranger, False)):
            context = client_context(issued, shows=shown)
            async with httpx.AsyncClient(base_url=client.base_url, verify=context) as other:
                if is_taken:
                    assert (await other.get("/v1/models")).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await other.get("/readyz")


async def test_the_health_command_of_a_container_follows_its_variables(
    fake: FakeTokenizer, address: str, issued: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(address, issued, ssl_cert_reqs=2) as client:
        await wait_ready(client)
        url = f"http://localhost:{client.base_url.port}/readyz"
        assert await asyncio.to_thread(health.main, [url]) == 1
        monkeypatch.setenv("PAGEWIRE_SSL_CERTFILE", str(issued.certfile))
        assert await asyncio.to_thread(health.main, [url]) == 0


# Bounds.


async def test_a_handshake_that_does_not_end_is_given_up(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    before = closed("handshake_timeout")
    async with running(address, issued, limits=Limits(head_s=0.3)) as client:
        async with connected(client) as silent, connected(client) as slow:
            await slow.send("\x16\x03\x01")  # the beginning of a message of TLS
            await eventually(lambda: is_open("handshake") == 2)
            assert await silent.rest() == await slow.rest() == ""
        assert closed("handshake_timeout") == before + 2
        assert is_open("handshake") == 0


async def test_slow_headers_are_given_up_with_tls(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    async with (
        running(address, issued, limits=Limits(head_s=0.3)) as client,
        connected_with_tls(client, issued) as slow,
    ):
        await slow.send("GET /v1/models HTTP/1.1\r\n")
        assert (await slow.rest()).startswith("HTTP/1.1 408 ")


async def test_handshakes_make_room(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    """Clients that send requests are served, however many handshakes are abandoned."""
    before = closed("handshake_for_new")
    limits = Limits(connections=3, reserve=2, new_s=0.0)
    async with running(address, issued, limits=limits) as client, contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(connected(client))
        await eventually(lambda: is_open("handshake") == 3)
        await wait_ready(client)
        assert closed("handshake_for_new") > before


async def test_too_many_connections_are_refused_with_tls(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    before = closed("refused")
    limits = Limits(connections=3, reserve=2)
    async with running(address, issued, limits=limits) as client, contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(connected(client)) for _ in range(7)]
        await eventually(lambda: closed("refused") == before + 2)
        assert await opened[-1].rest() == ""
        assert is_open("handshake") == 5


async def test_a_reader_that_is_too_slow_is_cut_off_with_tls(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    before = closed("unread")
    async with running(address, issued, send_buffer=16 * 1024, limits=Limits(unread_s=0.4)) as client:
        await wait_ready(client)
        fake.max_model_len, fake.tokens_per_step = 10**9, 20_000
        fake.generate = lambda prompt, seed, n: "x" * n
        async with connected_with_tls(client, issued) as lazy:
            await lazy.send(completion(max_tokens=10**7, stream=True))
            await eventually(lambda: closed("unread") == before + 1)
            await eventually(lambda: not fake.live)


async def test_it_stops_at_once_with_a_handshake_open(fake: FakeTokenizer, address: str, issued: Issued) -> None:
    leave = asyncio.Event()
    async with running(address, issued, leave=leave) as client, connected(client) as silent:
        await eventually(lambda: is_open("handshake") == 1)
        leave.set()
        assert await silent.rest() == ""
        assert is_open("handshake") == 0


# Files that change.


async def test_a_new_certificate_is_shown_without_a_restart(
    fake: FakeTokenizer,
    address: str,
    issued: Issued,
    ca: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls, "CHECK_INTERVAL_S", 0.0)
    paths = (issued.certfile, issued.keyfile, issued.ca_certs)
    files = Issued(*(Path(shutil.copy(path, tmp_path)) for path in paths))
    async with running(address, files) as client:
        server = (client.base_url.host, client.base_url.port)
        first = await asyncio.to_thread(ssl.get_server_certificate, server)
        renewed = ca.issue("renewed")
        shutil.copy(renewed.keyfile, files.keyfile)
        assert await asyncio.to_thread(ssl.get_server_certificate, server) == first, "the key is not its own"
        shutil.copy(renewed.certfile, files.certfile)
        assert await asyncio.to_thread(ssl.get_server_certificate, server) != first
        await wait_ready(client)
