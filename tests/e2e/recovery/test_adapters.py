"""Requests with an adapter over real processes, each of which is killed: they go on with the contents that they began
with, although the name stands for others meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import short_directory
from tests.e2e.line import Line, http_client

MAX_TOKENS = 150
SERVICES = ("executor", "scheduler", "tokenizer", "gateway", "sister")


class FakeLine(Line):
    """A line with a fake executor."""

    def arguments(self, service: str) -> list[str]:
        if service == "executor":
            return ["fake-executor", self.address(service), "1", "0.01"]
        return super().arguments(service)


@pytest.fixture(scope="module")
def line(smollm2_gguf: Path) -> Iterator[Line]:
    with short_directory() as name:
        line = FakeLine(Path(name), str(smollm2_gguf))
        try:
            for service in SERVICES:
                line.start(service)
            asyncio.run(line.wait_ready())
            yield line
        finally:
            line.stop()


@pytest.fixture
async def http(line: Line) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(base_url=line.base_url, timeout=60) as client:
        await load(client, "/a")
        yield client


async def load(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.put("/v1/admin/adapters/x", json={"path": path, "replaces": True})
    assert answer.status_code == 200, answer.text


class Client:
    """Reads a stream, and comes again at the sister after its last event if the connection breaks."""

    def __init__(self, line: Line, model: str, key: str) -> None:
        self._urls = [line.base_url, line.sister_url]
        self._headers = {"Idempotency-Key": key}
        self._body = {"model": model, "prompt": "Once", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        self._body["return_token_ids"] = True
        self.token_ids: list[int] = []
        self.fingerprints = set[str]()

    async def read(self) -> None:
        async with http_client(timeout=60) as client:
            for url in self._urls:
                try:
                    async with self._stream(client, url) as response:
                        await self._take(response)
                    return
                except httpx.TransportError:
                    pass
        raise AssertionError("both gateways are lost")

    @asynccontextmanager
    async def _stream(self, client: httpx.AsyncClient, url: str) -> AsyncIterator[httpx.Response]:
        async with client.stream("POST", f"{url}/v1/completions", json=self._body, headers=self._headers) as response:
            assert response.status_code == 200, await response.aread()
            yield response

    async def _take(self, response: httpx.Response) -> None:
        text = ""
        async for piece in response.aiter_text():
            *events, text = (text + piece).split("\n\n")
            for event in events:
                id, _, data = event.partition("\ndata: ")
                self._headers["Last-Event-ID"] = id.removeprefix("id: ")
                if data.startswith("{"):
                    self._on_event(json.loads(data))

    def _on_event(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        assert event["model"] == self._body["model"]
        self.fingerprints.add(event["system_fingerprint"])
        for choice in event["choices"]:
            self.token_ids += choice.get("token_ids") or []


async def read(line: Line, model: str, key: str) -> list[int]:
    client = Client(line, model, key)
    await client.read()
    assert len(client.token_ids) == MAX_TOKENS
    return client.token_ids


@pytest.mark.parametrize("service", ["scheduler", "tokenizer", "gateway"])
async def test_a_request_keeps_its_adapter(line: Line, http: httpx.AsyncClient, service: str) -> None:
    expected, of_model = await asyncio.gather(read(line, "x", f"{service} a"), read(line, "m", f"{service} m"))
    assert expected != of_model
    client = Client(line, "x", f"{service} killed")
    reading = asyncio.create_task(client.read())
    while len(client.token_ids) < 5:
        assert not reading.done()
        await asyncio.sleep(0.005)
    await load(http, "/b")
    line.restart(service)
    await reading
    await line.wait_ready()
    assert client.token_ids == expected
    assert client.fingerprints == {"+" + "a" * 12}
    later = await read(line, "x", f"{service} b")
    assert later not in (expected, of_model)


async def test_an_adapter_is_listed_found_and_taken_away(line: Line, http: httpx.AsyncClient) -> None:
    async def names() -> list[str]:
        return [model["id"] for model in (await http.get("/v1/models")).json()["data"]]

    body = {"model": "found", "prompt": "Once", "max_tokens": 3}
    assert (await http.post("/v1/completions", json=body)).json()["system_fingerprint"] == "+" + "f" * 12
    assert await names() == ["m", "found", "x"]
    assert (await http.post("/v1/completions", json=body | {"model": "nothing"})).status_code == 404
    assert (await http.delete("/v1/admin/adapters/x")).status_code == 204
    assert (await http.post("/v1/completions", json=body | {"model": "x"})).status_code == 404
    samples = (await http.get("/metrics")).text
    assert 'pagewire:adapter_requests_total{adapter="found",model_name="m",service="scheduler"} 1.0' in samples
    assert "pagewire:lora_requests_info{" in samples and 'max_lora="2"' in samples
