"""API keys: the routes that need one, and the rights of a key. The tests cover all routes of the application."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import BaseRoute, Mount, Route

from pagewire.gateway.app import with_routes
from pagewire.tools.keys import KeysAddConfig, add
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

# (method, path) that need none: probes, and the files of the page, which have nothing of the model or its users.
PROBES = {("GET", path) for path in ("/livez", "/readyz", "/ready", "/health", "/ping")} | {("POST", "/ping")}
PAGE = {("GET", "/"), ("HEAD", "/"), ("GET", "/docs"), ("HEAD", "/docs")}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}


def new(path: Path, name: str, **settings: float) -> dict[str, str]:
    return {"authorization": f"Bearer {add(path, KeysAddConfig(name=name, **settings))}"}  # type: ignore[arg-type]


def _routes(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Route):
            for method in route.methods or ():
                yield method, route.path
        elif not isinstance(route, Mount):  # a router that is included
            yield from _routes(route.original_router.routes)  # type: ignore[attr-defined]


def all_routes() -> set[tuple[str, str]]:
    return set(_routes(with_routes().routes))


@pytest.mark.parametrize("setting", ["api_key", "api_key_file"])
async def test_every_route_but_probes_and_the_page_refuses_without_a_key(
    setting: str, fake: FakeTokenizer, address: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    good = new(path, "a")
    value = good["authorization"].removeprefix("Bearer ") if setting == "api_key" else str(path)
    routes = all_routes()
    assert len(routes) > 60 and routes >= PROBES | PAGE
    async with running_gateway(address, **{setting: value}) as client:
        await wait_ready(client)
        for method, route in sorted(routes):
            url = route.replace("{", "").replace("}", "").replace(":path", "")
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                response = await client.request(method, url, headers=headers)
                is_open = (method, route) in PROBES | PAGE
                assert (response.status_code != 401) == is_open, (method, route)
        assert not fake.submissions
        assert (await client.get("/v1/models", headers=good)).status_code == 200
        assert (await client.get("/metrics", headers=good)).status_code == 200


async def test_keys_are_tenants_and_come_and_go(fake: FakeTokenizer, address: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    alice = new(path, "alice", weight=3)
    async with running_gateway(address, api_key="one", api_key_file=str(path)) as client:
        await wait_ready(client)
        for headers, tenant in ((alice, ("alice", 3)), ({"x-api-key": "one"}, ("", 1))):
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
            context = fake.submissions[-1].context
            assert (context.tenant, context.tenant_weight or 1) == tenant
        bob = new(path, "bob")
        async with asyncio.timeout(20):
            while (await client.get("/v1/models", headers=bob)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await client.get("/v1/models", headers=alice)).status_code == 200


async def test_a_client_that_sends_too_much_learns_when_to_retry(
    fake: FakeTokenizer, address: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    few, other = new(path, "few", requests_per_minute=1), new(path, "other")
    async with running_gateway(address, api_key_file=str(path)) as client:
        await wait_ready(client)
        url = "/v1/chat/completions"
        assert (await client.post(url, json=CHAT, headers=few)).status_code == 200
        refused = await client.post(url, json=CHAT, headers=few)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await client.get("/v1/models", headers=few)).status_code == 200, "what computes nothing has no limit"
        assert (await client.post(url, json=CHAT, headers=other)).status_code == 200


async def test_a_client_at_its_limit_of_requests_waits(fake: FakeTokenizer, address: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    one = new(path, "one", max_running=1)
    async with running_gateway(address, api_key_file=str(path)) as client:
        await wait_ready(client)
        fake.running.clear()
        first = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers=one))
        await eventually(lambda: fake.live)
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=one)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        fake.running.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=one)).status_code == 200


async def test_batches_run_with_keys(fake: FakeTokenizer, address: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    alice = new(path, "alice", requests_per_minute=3)
    async with running_gateway(address, api_key_file=str(path)) as client:
        await wait_ready(client)
        line = '{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
        text = "".join(line % number for number in range(5))
        sent = await client.post(
            "/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}, headers=alice
        )
        body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body, headers=alice)).json()
        async with asyncio.timeout(20):
            while batch["status"] != "completed":
                await asyncio.sleep(0.02)
                batch = (await client.get(f"/v1/batches/{batch['id']}", headers=alice)).json()
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}


async def test_keys_are_not_logged(
    fake: FakeTokenizer, address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    alice = new(path, "alice")
    with caplog.at_level("DEBUG"):
        async with running_gateway(address, api_key_file=str(path)) as client:
            await wait_ready(client)
            await client.post("/v1/chat/completions", json=CHAT, headers=alice)
            await client.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": "guessed-it"})
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("pagewire", "uvicorn"))]
    secret = alice["authorization"].removeprefix("Bearer ")
    assert ours and not any(secret in line or "guessed-it" in line for line in ours)


async def test_metrics_show_a_tenant_no_other(fake: FakeTokenizer, address: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    headers = {name: new(path, name, admin=name == "root") for name in ("alice", "root")}
    # A name of its own: a scheduler of another test in this process may count tenants in the same registry.
    lines = [f'pagewire:tenant_calls_total{{tenant="{name}"}} 2.0' for name in ("alice", "al", "bob", "other")]
    fake.more_metrics = "# TYPE pagewire:tenant_calls_total counter\n" + "\n".join(lines) + "\n"
    async with running_gateway(address, api_key_file=str(path)) as client:
        await wait_ready(client)
        texts = {name: (await client.get("/metrics", headers=own)).text for name, own in headers.items()}
    named = {name: set(re.findall(r'tenant_calls_total\{[^}]*tenant="([^"]*)"', text)) for name, text in texts.items()}
    assert named == {"alice": {"alice"}, "root": {"alice", "al", "bob", "other"}}
