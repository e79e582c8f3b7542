"""Pages of other origins: what browsers are told about them."""

import asyncio
from typing import Any

import httpx
import pytest

from pagewire.config import GatewayConfig
from pagewire.errors import StartupError
from pagewire.gateway.http.connection_limits import Limits
from pagewire.gateway.http.cors import Cors
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

PAGE = "https://page.example"
CHAT = {"messages": [{"role": "user", "content": "a"}]}
EXPOSED = "x-request-id, request-id, retry-after, retry-after-ms, x-weights-version"


def cors(answer: httpx.Response) -> dict[str, str]:
    return {
        name: value for name, value in answer.headers.items() if name.startswith("access-control-") or name == "vary"
    }


def preflight(origin: str = PAGE, method: str = "POST", headers: str = "authorization, content-type") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": headers,
    }


async def test_every_answer_has_the_headers_and_a_preflight_needs_no_key(fake: FakeTokenizer, address: str) -> None:
    own = {"vary": "Origin", "access-control-allow-origin": PAGE, "access-control-expose-headers": EXPOSED}
    async with running_gateway(address, allowed_origins=f'["{PAGE}"]', api_key="secret") as client:
        await wait_ready(client)
        answer = await client.options("/v1/chat/completions", headers=preflight())
        assert answer.status_code == 200 and not answer.content
        assert cors(answer) == {
            "vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers",
            "access-control-allow-origin": PAGE,
            "access-control-allow-methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
            "access-control-allow-headers": "authorization, content-type",
            "access-control-max-age": "600",
        }
        key, asked = {"authorization": "Bearer secret"}, {"origin": PAGE}
        whole = await client.post("/v1/chat/completions", json=CHAT, headers=asked | key)
        stream = await client.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=asked | key)
        no_key = await client.post("/v1/chat/completions", json=CHAT, headers=asked)
        wrong = await client.post("/v1/chat/completions", json={}, headers=asked | key)
        nothing = await client.get("/v1/nothing", headers=asked | key)
        answers = (whole, stream, no_key, wrong, nothing)
        assert [one.status_code for one in answers] == [200, 200, 401, 400, 404]
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert all(cors(one) == own for one in answers)
        # Other origins, and clients that are no browsers.
        other = await client.post("/v1/chat/completions", json=CHAT, headers=key | {"origin": "https://other.example"})
        assert cors(other) == cors(await client.get("/livez")) == {"vary": "Origin"}
        refused = await client.options("/v1/models", headers=preflight("https://other.example"))
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)
        assert "--allowed-origins" in refused.text
        # OPTIONS without these headers is a request as any other.
        assert (await client.options("/v1/models", headers=asked | key)).status_code == 405


@pytest.mark.parametrize(
    ("flags", "origin", "credentials"),
    [
        ({"allowed_origins": '["*"]'}, "*", None),
        # Browsers take no * beside credentials.
        ({"allowed_origins": '["*"]', "allow_credentials": True}, PAGE, "true"),
        ({"allowed_origins": f"https://a.example,{PAGE}", "allow_credentials": True}, PAGE, "true"),
        ({}, None, None),
        ({"allowed_origins": "[]"}, None, None),
    ],
)
async def test_any_origin(
    fake: FakeTokenizer, address: str, flags: dict[str, Any], origin: str | None, credentials: str | None
) -> None:
    async with running_gateway(address, **flags) as client:
        for answer in (
            await client.get("/v1/models", headers={"origin": PAGE}),
            await client.options("/v1/models", headers=preflight()),
        ):
            assert answer.headers.get("access-control-allow-origin") == origin
            assert answer.headers.get("access-control-allow-credentials") == credentials
            is_for_one = origin not in (None, "*") or answer.request.method == "OPTIONS"
            assert ("vary" in answer.headers) == (is_for_one and origin is not None)


async def test_methods_and_headers_are_those_of_the_flags(fake: FakeTokenizer, address: str) -> None:
    flags = {"allowed_origins": "*", "allowed_methods": '["GET", "POST"]', "allowed_headers": '["X-Mine"]'}
    async with running_gateway(address, **flags) as client:
        taken = await client.options("/v1/models", headers=preflight(headers="x-mine"))
        assert taken.headers["access-control-allow-methods"] == "GET, POST"
        assert taken.headers["access-control-allow-headers"] == "x-mine"
        refused = await client.options("/v1/models", headers=preflight(headers="x-mine, x-other"))
        assert (refused.status_code, refused.text) == (
            400,
            "CORS: header 'x-other' is not allowed (--allowed-headers)\n",
        )
        refused = await client.options("/v1/models", headers=preflight(method="DELETE", headers=""))
        assert (refused.status_code, refused.text) == (
            400,
            "CORS: method 'DELETE' is not allowed (--allowed-methods)\n",
        )


@pytest.mark.parametrize(("origin", "status"), [(PAGE, 403), ("null", 403), ("http://localhost:3000", 400)])
async def test_without_keys_no_page_from_elsewhere_changes_the_service(
    fake: FakeTokenizer, address: str, origin: str, status: int
) -> None:
    async with running_gateway(address, allowed_origins="*") as client:
        answer = await client.post("/v1/admin/weights", json={}, headers={"origin": origin})
        assert answer.status_code == status


async def test_refusals_before_the_routes_have_the_headers(fake: FakeTokenizer, address: str) -> None:
    limits = Limits(head_bytes=2000)
    async with running_gateway(address, limits=limits, allowed_origins=PAGE) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"GET / HTTP/1.1\r\nOrigin: %b\r\nX: %b" % (PAGE.encode(), b"x" * 3000))
        answer = (await reader.read()).decode()
        writer.close()
        assert answer.startswith("HTTP/1.1 431") and f"access-control-allow-origin: {PAGE}\r\n" in answer


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"allowed_origins": "page.example"}, "'page.example' is not an origin"),
        ({"allowed_origins": f"{PAGE}/"}, "without a path"),
        ({"allowed_origins": "*", "allowed_methods": "GET POST"}, "--allowed-methods: 'GET POST'"),
    ],
)
def test_what_no_browser_would_send_is_refused_at_the_start(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        Cors.of(GatewayConfig(**flags))
