"""Ollama's API before a stack: models are loaded, kept and put away as its clients wish."""

import asyncio
from pathlib import Path

import httpx
import pytest

from pagewire.gateway.dialects.ollama import pull
from pagewire.v1.common_pb2 import MODEL_KIND_UNSPECIFIED
from tests.gateway.conftest import eventually, running_gateway
from tests.gateway.core.test_keys import new
from tests.gateway.models.fake_stack import READY, FakeStack

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": False, "options": {"num_predict": 2, "seed": 1}}


async def in_memory(client: httpx.AsyncClient) -> list[str]:
    return [one["name"] for one in (await client.get("/api/ps")).json()["models"]]


async def test_a_request_without_a_prompt_loads_and_unloads(two: httpx.AsyncClient, stack: FakeStack) -> None:
    names = [one["name"] for one in (await two.get("/api/tags")).json()["models"]]
    assert names == ["a:latest", "gpt:latest", "b:latest"] and await in_memory(two) == []
    loaded = (await two.post("/api/generate", json={"model": "b:latest"})).json()
    assert (loaded["done_reason"], await in_memory(two)) == ("load", ["b:latest"])
    unloaded = (await two.post("/api/generate", json={"model": "b", "keep_alive": 0})).json()
    assert (unloaded["done_reason"], stack.rests, await in_memory(two)) == ("unload", ["b"], [])
    assert (await two.post("/api/embed", json={"model": "b", "input": []})).json()["embeddings"] == []
    assert await in_memory(two) == ["b:latest"]


@pytest.mark.parametrize(
    ("keep_alive", "seconds"), [("5m", 300.0), (90, 90.0), (-1, -1.0), ("-1m", -60.0), (None, None)]
)
async def test_a_model_stays_as_long_as_a_client_wishes(
    two: httpx.AsyncClient, stack: FakeStack, keep_alive: object, seconds: float | None
) -> None:
    answer = await two.post("/api/chat", json=CHAT | {"model": "gpt", "keep_alive": keep_alive})
    assert answer.status_code == 200 and stack.services["a"].received[0].model == "a"
    wished = [one.idle_seconds for one in stack.requests if one.HasField("idle_seconds")]
    assert wished == ([] if seconds is None else [seconds])


@pytest.mark.parametrize(
    ("path", "body"), [("/api/chat", CHAT), ("/api/embed", {"input": "i"}), ("/api/embeddings", {"prompt": "p"})]
)
async def test_a_model_is_put_away_after_the_answer(
    two: httpx.AsyncClient, stack: FakeStack, path: str, body: dict[str, object]
) -> None:
    assert (await two.post(path, json=body | {"model": "b", "keep_alive": 0})).status_code == 200
    await eventually(lambda: stack.rests == ["b"])


async def test_a_tenant_does_not_decide_for_others_how_long_a_model_stays(stack: FakeStack, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    client_key, operator = new(keys, "client"), {"authorization": "Bearer admin"}
    settings = {"api_key": "admin", "api_key_file": str(keys), "lines_address": stack.address}
    stack.services["a"].kind = MODEL_KIND_UNSPECIFIED
    async with running_gateway(stack.address, **settings) as client:
        for keep_alive in (0, -1, "1h"):
            answer = await client.post(
                "/api/chat", json=CHAT | {"model": "a", "keep_alive": keep_alive}, headers=client_key
            )
            assert answer.status_code == 200
        unload = {"model": "a", "keep_alive": 0}
        refused = await client.post("/api/generate", json=unload, headers=client_key)
        assert refused.status_code == 403 and "may not change the service" in refused.json()["error"]
        assert not stack.rests and not any(one.HasField("idle_seconds") for one in stack.requests)
        assert (await client.post("/api/generate", json=unload, headers=operator)).status_code == 200
        assert stack.rests == ["a"]


async def test_the_time_until_a_model_rests(two: httpx.AsyncClient, stack: FakeStack) -> None:
    line = stack.lines["b"]
    line.rest_time.FromJsonString("2030-01-02T03:04:05Z")
    line.memory_bytes = 77
    assert (await two.post("/api/generate", json={"model": "b"})).status_code == 200
    [loaded] = (await two.get("/api/ps")).json()["models"]
    assert (loaded["expires_at"], loaded["size"]) == ("2030-01-02T03:04:05Z", 77)


async def test_a_description_loads_nothing(two: httpx.AsyncClient, stack: FakeStack) -> None:
    stack.lines["b"].model.files.format = "gguf"
    stack.tell()
    async with asyncio.timeout(10):
        while (await two.post("/api/show", json={"model": "b"})).json()["details"]["format"] != "gguf":
            pass
    assert not stack.requests


async def test_a_pulled_model_is_served(
    two: httpx.AsyncClient, stack: FakeStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pull, "from_hub", lambda *arguments, **named: tmp_path)
    monkeypatch.setattr(pull, "weights_digest", lambda path: "12")
    name = "hf.co/me/it:Q8_0"
    assert (await two.post("/api/pull", json={"model": name, "stream": False})).json() == {"status": "success"}
    assert (await two.post("/api/chat", json=CHAT | {"model": name})).json()["model"] == name
    await eventually(lambda: stack.lines[name].state == READY)


async def test_clients_accept_the_version(client: httpx.AsyncClient) -> None:
    version = (await client.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "what Copilot of VS Code asks for"
