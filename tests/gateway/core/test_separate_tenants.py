"""Stored objects of a tenant are invisible to other tenants, on every route with an id."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.core.test_keys import all_routes, new
from tests.gateway.fake_tokenizer import FakeTokenizer

LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}\n'
LISTS = ("/v1/files", "/v1/batches")


class Doors(NamedTuple):
    client: httpx.AsyncClient
    alice: dict[str, str]
    bob: dict[str, str]


@pytest.fixture
async def doors(fake: FakeTokenizer, address: str, tmp_path: Path) -> AsyncIterator[Doors]:
    keys = tmp_path / "keys"
    alice, bob = new(keys, "alice"), new(keys, "bob")
    async with running_gateway(address, api_key_file=str(keys)) as client:
        await wait_ready(client)
        yield Doors(client, alice, bob)


async def keep(client: httpx.AsyncClient, headers: dict[str, str]) -> dict[str, str]:
    """One of everything; its ids, by the parameter of a path that names it."""
    data: dict[str, Any] = {"files": {"file": ("in.jsonl", LINE)}, "data": {"purpose": "batch"}}
    file = (await client.post("/v1/files", headers=headers, **data)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=body, headers=headers)).json()["id"]
    response = (await client.post("/v1/responses", json={"input": "hi", "background": True}, headers=headers)).json()
    return {"file_id": file, "batch_id": batch, "response_id": response["id"]}


async def ended(doors: Doors, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            batch: dict[str, Any] = (await doors.client.get(f"/v1/batches/{batch_id}", headers=doors.alice)).json()
            if batch["status"] == "completed":
                return batch
            await asyncio.sleep(0.02)


async def test_no_route_finds_what_is_anothers(doors: Doors) -> None:
    kept = await keep(doors.client, doors.alice)
    batch = await ended(doors, kept["batch_id"])
    routes = [(method, path) for method, path in sorted(all_routes()) if any(f"{{{name}}}" in path for name in kept)]
    assert len(routes) >= 9
    for method, path in sorted(routes, key=lambda route: route[0] == "DELETE"):
        url = path.format(**kept)
        refused = await doors.client.request(method, url, headers=doors.bob)
        assert refused.status_code == 404, (method, path)
        assert "alice" not in refused.text
        mine = await doors.client.request(method, url, headers=doors.alice)
        assert mine.status_code in (200, 409), (method, path, mine.text)
    content = f"/v1/files/{batch['output_file_id']}/content"
    assert (await doors.client.get(content, headers=doors.bob)).status_code == 404
    assert '"custom_id"' in (await doors.client.get(content, headers=doors.alice)).text


async def test_lists_have_only_ones_own(doors: Doors) -> None:
    alices, bobs = await keep(doors.client, doors.alice), await keep(doors.client, doors.bob)
    lists = [path for method, path in all_routes() if method == "GET" and path in LISTS]
    assert sorted(lists) == sorted(LISTS)
    for path, name in zip(LISTS, ("file_id", "batch_id"), strict=True):
        for headers, own, others in ((doors.alice, alices, bobs), (doors.bob, bobs, alices)):
            listed = [one["id"] for one in (await doors.client.get(path, headers=headers)).json()["data"]]
            assert own[name] in listed and others[name] not in listed
            after = await doors.client.get(path, params={"after": others[name]}, headers=headers)
            assert after.status_code == 404, "a place in another's list is none"


async def test_what_is_anothers_cannot_be_built_upon(doors: Doors) -> None:
    client, kept = doors.client, await keep(doors.client, doors.alice)
    body: dict[str, Any] = {"input": "go on"}
    first = (await client.post("/v1/responses", json=body, headers=doors.alice)).json()
    item = f"msg_{first['id'].removeprefix('resp_')}_i0"
    for change in (
        {"previous_response_id": first["id"]},
        {"input": [{"type": "item_reference", "id": item}]},
    ):
        refused = await client.post("/v1/responses", json=body | change, headers=doors.bob)
        assert refused.status_code == 400 and "was never stored" in refused.json()["error"]["message"]
        mine = await client.post("/v1/responses", json=body | change, headers=doors.alice)
        assert mine.status_code == 200, mine.text
    batch = {"input_file_id": kept["file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await client.post("/v1/batches", json=batch, headers=doors.bob)).status_code == 404


async def test_kept_generations_are_of_one_owner(doors: Doors) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 3}
    headers = {"idempotency-key": "1"}
    first = await doors.client.post("/v1/completions", json=body, headers=headers | doors.alice)
    place = next(line.removeprefix("id: ") for line in first.text.splitlines() if line.startswith("id: "))
    again = {"last-event-id": place}
    assert (await doors.client.post("/v1/completions", json=body, headers=again | doors.bob)).status_code == 404
    assert (await doors.client.post("/v1/completions", json=body, headers=again | doors.alice)).status_code == 200
    by_other_header = {"x-api-key": doors.alice["authorization"].removeprefix("Bearer ")}
    same = await doors.client.post("/v1/completions", json=body, headers=headers | by_other_header)
    assert same.text == first.text, "never a second one"
    other = await doors.client.post("/v1/completions", json=body, headers=headers | doors.bob)
    assert other.status_code == 200 and place not in other.text


async def test_a_cancelled_response_was_ones_own(doors: Doors, fake: FakeTokenizer) -> None:
    """Another tenant cannot cancel a response, nor its job, which is not a document."""
    fake.running.clear()
    body = {"input": "hi", "background": True}
    id = (await doors.client.post("/v1/responses", json=body, headers=doors.alice)).json()["id"]
    assert (await doors.client.post(f"/v1/responses/{id}/cancel", headers=doors.bob)).status_code == 404
    assert (await doors.client.delete(f"/v1/responses/{id}", headers=doors.bob)).status_code == 404
    fake.running.set()
    async with asyncio.timeout(20):
        while True:
            response = (await doors.client.get(f"/v1/responses/{id}", headers=doors.alice)).json()
            if response["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.02)
    assert response["status"] != "cancelled" and response["output"]
