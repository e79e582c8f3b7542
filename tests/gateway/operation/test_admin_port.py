"""The port of --admin-port, which has all routes for operators; keys that may change the service."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request

from pagewire.config import GatewayConfig
from pagewire.errors import StartupError
from pagewire.gateway.main import listen_for_operators
from pagewire.gateway.operation.admin import routes as admin_routes
from pagewire.gateway.operation.admin.route import AdminRoute
from pagewire.gateway.operation.bodies import Health
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.core.test_keys import PROBES, new
from tests.gateway.fake_tokenizer import FakeTokenizer

FOR_OPERATORS = ["/metrics", "/v1/status", "/v1/status/stream"]
CHANGE = "/v1/admin/nothing"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@asynccontextmanager
async def with_admin_port(address: str, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Clients of the public port and of that for operators."""
    port = free_port()
    async with (
        running_gateway(address, admin_port=port, **settings) as public,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as admin,
    ):
        await wait_ready(public)
        yield public, admin


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> str:
    """A route that changes the service, as others in its place do."""
    router = APIRouter(route_class=AdminRoute)

    @router.post(CHANGE)
    async def nothing(request: Request) -> Health:
        return Health(status="ok")

    monkeypatch.setattr(admin_routes, "ROUTERS", (*admin_routes.ROUTERS, router))
    return CHANGE


async def test_what_operators_ask_for_has_left_the_public_port(fake: FakeTokenizer, address: str, change: str) -> None:
    async with with_admin_port(address) as (public, admin):
        for path in FOR_OPERATORS:
            assert (await public.get(path)).status_code == 404
        assert (await public.post(change)).status_code == 404
        assert "pagewire:http_requests_total" in (await admin.get("/metrics")).text
        assert (await admin.get("/v1/status")).json()["ready"]
        async with admin.stream("GET", "/v1/status/stream") as events:
            assert (await anext(events.aiter_lines())).startswith("data: ")
        assert (await admin.post(change)).status_code == 200
        for method, path in PROBES:
            assert (await admin.request(method, path)).status_code == 200
        for path in ("/", "/docs", "/openapi.json", "/v1/models", "/v1/files", "/version", "/page/app.js"):
            assert (await admin.get(path)).status_code == 404, path
        assert (await admin.post("/v1/completions", json={"prompt": "a"})).status_code == 404
        assert not {*FOR_OPERATORS, change} & (await public.get("/openapi.json")).json()["paths"].keys()
        assert not fake.submissions


async def test_the_admin_port_asks_for_keys_and_changes_for_those_that_may(
    fake: FakeTokenizer, address: str, change: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    user, operator = new(path, "user"), new(path, "operator", admin=True)
    async with with_admin_port(address, api_key="one", api_key_file=str(path)) as (_, admin):
        for route in FOR_OPERATORS:
            assert (await admin.get(route)).status_code == 401
        assert (await admin.post(change)).status_code == 401
        assert (await admin.get("/readyz")).status_code == 200
        assert (await admin.get("/metrics", headers=user)).status_code == 200
        refused = await admin.post(change, headers=user)
        assert refused.status_code == 403 and "keys add --admin" in refused.json()["error"]["message"]
        for headers in (operator, {"x-api-key": "one"}):
            assert (await admin.post(change, headers=headers)).status_code == 200


async def test_no_route_that_changes_the_service_takes_a_users_key(
    fake: FakeTokenizer, address: str, tmp_path: Path
) -> None:
    """Whatever such routes there are."""
    path = tmp_path / "keys"
    user = new(path, "user")
    found = [route for router in admin_routes.ROUTERS for route in router.routes if isinstance(route, AdminRoute)]
    changes = [(method, route.path) for route in found for method in route.methods]
    assert ("POST", "/v1/admin/weights") in changes
    async with with_admin_port(address, api_key_file=str(path)) as (public, admin):
        for method, route in changes:
            assert (await admin.request(method, route)).status_code == 401
            assert (await admin.request(method, route, headers=user)).status_code == 403
            gone = await public.request(method, route, headers=user)
            assert gone.status_code in (404, 501), "it has left the public port"


async def test_without_keys_only_this_machine_changes_the_service(
    fake: FakeTokenizer, address: str, change: str
) -> None:
    async with running_gateway(address) as loopback:
        await wait_ready(loopback)
        assert (await loopback.post(change)).status_code == 200
        for host in ("localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000"):
            assert (await loopback.post(change, headers={"host": host})).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "a{b.evil.example", "evil.example/localhost", "0.0.0.0"):
            assert (await loopback.post(change, headers={"host": host})).status_code == 403, host
    async with running_gateway(address, host="0.0.0.0") as everywhere:
        await wait_ready(everywhere)
        refused = await everywhere.post(change)
        assert refused.status_code == 403 and "--api-key" in refused.json()["error"]["message"]
        assert (await everywhere.get("/metrics")).status_code == 200


async def test_the_admin_port_answers_until_the_last_request_has_ended(fake: FakeTokenizer, address: str) -> None:
    leave = asyncio.Event()
    async with with_admin_port(address, leave=leave, shutdown_timeout=20) as (public, admin):
        fake.running.clear()
        asked = asyncio.create_task(public.post("/v1/completions", json={"prompt": "a"}))
        await eventually(lambda: fake.live)
        leave.set()
        async with asyncio.timeout(10):
            while (await admin.get("/readyz")).status_code != 503:  # noqa: ASYNC110 - the state of a service
                await asyncio.sleep(0.01)
        assert (await admin.get("/metrics")).status_code == 200
        fake.running.set()
        assert (await asked).status_code == 200


def test_an_admin_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127.0.0.1:{port} .* --admin-host and --admin-port"):
            listen_for_operators(GatewayConfig(admin_port=port))
