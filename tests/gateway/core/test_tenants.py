"""The tenant of a request, on every path from a client to the services behind the gateway."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.config import GatewayConfig
from pagewire.errors import StartupError
from pagewire.gateway import main
from pagewire.wire.keys.entry import Key, digest_of
from pagewire.wire.tenants import ClientTenants
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

HEADER = "X-Tenant-ID"
ACME = {HEADER: "acme & sons"}
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
async def client(fake: FakeTokenizer, address: str) -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway(address, tenant_header=HEADER) as http:
        await wait_ready(http)
        yield http


def submitted(fake: FakeTokenizer) -> set[str]:
    return {submission.context.tenant for submission in fake.submissions}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY | {"n": 2}),
        (CHAT, BODY | {"stream": True}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/messages", BODY),
        ("/v1/responses", {"input": "hi"}),
        ("/generate", {"text": "hi"}),
    ],
)
async def test_generations_have_the_tenant_of_the_header(
    client: httpx.AsyncClient, fake: FakeTokenizer, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(path, json=body, headers=ACME)).status_code == 200
    assert submitted(fake) == {"acme & sons"}
    fake.submissions.clear()
    assert (await client.post(path, json=body)).status_code == 200
    assert submitted(fake) == {""}, "the one before is no longer meant"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "best_of": 2}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_searches_and_vectors_have_it_too(
    client: httpx.AsyncClient, fake: FakeTokenizer, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(path, json=body, headers=ACME)).status_code == 200
    assert (await client.post(path, json=body)).status_code == 200
    assert [tenant.name for tenant in fake.tenants] == ["acme & sons", ""]


async def test_lines_of_a_batch_are_whose_the_batch_is(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": BODY}).encode()
    upload = {"file": ("in.jsonl", line)}
    file = (await client.post("/v1/files", files=upload, data={"purpose": "batch"}, headers=ACME)).json()
    fake.running.clear()
    request = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await client.post("/v1/batches", json=request, headers=ACME)).status_code == 200
    await eventually(lambda: bool(fake.submissions))
    assert submitted(fake) == {"acme & sons"}


async def test_a_response_in_the_background_keeps_it_when_another_gateway_takes_it_over(
    fake: FakeTokenizer, address: str
) -> None:
    fake.running.clear()
    async with running_gateway(address, tenant_header=HEADER) as first:
        await wait_ready(first)
        body = {"input": "hi", "background": True}
        assert (await first.post("/v1/responses", json=body, headers=ACME)).status_code == 200
        await eventually(lambda: bool(fake.submissions))
    fake.submissions.clear()
    async with running_gateway(address):
        await eventually(lambda: bool(fake.submissions))
        assert submitted(fake) == {"acme & sons"}


async def test_the_header_is_ignored_without_the_flag(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address) as client:
        await wait_ready(client)
        assert (await client.post(CHAT, json=BODY, headers=ACME)).status_code == 200
        internal = {"pagewire-tenant": "acme", "pagewire-tenant-weight": "9"}
        await client.post("/v1/embeddings", json={"input": "a"}, headers=ACME | internal)
    assert submitted(fake) == {""}
    assert fake.tenants == [("", 0, 0)]


@pytest.mark.parametrize("name", ["", "X Tenant", "X-Tenant:", "héader", "grpc-tenant", "tenant-bin", "Authorization"])
async def test_a_header_that_cannot_be_one_stops_the_start(name: str) -> None:
    with pytest.raises(StartupError, match="--tenant-header"):
        ClientTenants(name)
    with pytest.raises(StartupError, match="--tenant-header"):
        await main.serve(GatewayConfig(port=0, tenant_header=name))


@pytest.mark.parametrize("names", [[""], ["x" * 129], ["caf\xe9"], ["a", "a"]])
async def test_a_wrong_name_is_refused(client: httpx.AsyncClient, fake: FakeTokenizer, names: list[str]) -> None:
    headers = [(HEADER.encode(), name.encode("latin-1")) for name in names]
    response = await client.post(CHAT, json=BODY, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == HEADER
    assert not fake.submissions


async def test_an_idempotency_key_is_the_tenants_own(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    ids = [
        (await client.post(CHAT, json=BODY, headers={HEADER: name, "Idempotency-Key": "k"})).json()["id"]
        for name in ("a", "b", "a")
    ]
    assert ids[0] == ids[2] != ids[1]


async def test_a_keys_owner_wins_over_the_header(fake: FakeTokenizer, address: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(Key(name="owner", digest=digest_of(b"k1"), weight=2, tokens_per_minute=9000).line() + "\n")
    async with running_gateway(address, tenant_header=HEADER, api_key_file=str(keys), api_key="k2") as client:
        await wait_ready(client)
        for key in ("k1", "k2"):
            headers = ACME | {"authorization": f"Bearer {key}"}
            assert (await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)).status_code == 200
            assert (await client.post(CHAT, json=BODY, headers=headers)).status_code == 200
    contexts = [submission.context for submission in fake.submissions]
    reported = [(context.tenant, context.tenant_weight, context.tokens_per_minute) for context in contexts]
    assert reported == fake.tenants == [("owner", 2, 9000), ("acme & sons", 0, 0)], "the key of --api-key has no owner"
