"""A gateway dies under streams, and its sister goes on with each of them right after the last event that was read."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import is_default
from tests.e2e.line import Line, http_client
from tests.e2e.recovery.test_recovery import TOOL

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
LONG = {"stream": True}
SAMPLED = {"temperature": 0.8, "seed": 7, "ignore_eos": True}
# name -> (path, body)
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": MESSAGES} | LONG | SAMPLED),
    "two choices": ("chat/completions", {"messages": MESSAGES, "n": 2, "logprobs": True} | LONG | SAMPLED),
    "completion": ("completions", {"prompt": ["Once", "The sea"], "logprobs": 1} | LONG | SAMPLED),
    "stop": (
        "completions",
        {"prompt": "One, two,", "stop": ["zzzz"], "include_stop_str_in_output": True} | LONG | SAMPLED,
    ),
    "tools": (
        "chat/completions",
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "temperature": 0.8, "seed": 5} | LONG,
    ),
    "message": ("messages", {"messages": MESSAGES, "temperature": 0} | LONG),
}


@pytest.fixture(scope="module")
def line(slow_line: Line) -> Line:
    """The quick line; the full sweep repeats the module on the default model."""
    return slow_line


@pytest.fixture
async def sister(line: Line) -> AsyncIterator[str]:
    line.start("sister")
    await line.wait_ready("sister")
    yield line.sister_url
    line.kill("sister")


class Client:
    """Reads one stream, and comes again after its last event if the connection breaks."""

    def __init__(self, base_urls: list[str], name: str, max_tokens: int) -> None:
        """base_urls: to be tried one after the other."""
        self._base_urls = base_urls
        self._path, body = STREAMS[name]
        self._body = body | {"max_tokens": max_tokens}
        self._headers = {"Idempotency-Key": f"{name} {base_urls}"}
        self.events: list[str] = []
        self.num_breaks = 0

    async def read(self) -> None:
        async with http_client(timeout=120) as client:
            while True:
                url = f"{self._base_urls[self.num_breaks]}/v1/{self._path}"
                try:
                    async with client.stream("POST", url, json=self._body, headers=self._headers) as response:
                        assert response.status_code == 200, await response.aread()
                        await self._read_events(response)
                    return
                except httpx.TransportError:
                    self.num_breaks += 1

    async def _read_events(self, response: httpx.Response) -> None:
        text = ""
        async for piece in response.aiter_text():
            text += piece
            *events, text = text.split("\n\n")
            for event in events:
                id, _, rest = event.partition("\n")
                self._headers["Last-Event-ID"] = id.removeprefix("id: ")
                self.events.append(rest)

    @property
    def received(self) -> dict[tuple[int, str], str]:
        """Returns the received text by choice and kind, whatever pieces it came in."""
        received: dict[tuple[int, str], str] = {}
        for event in self.events:
            _, found, data = event.rpartition("data: {")
            for index, kind, piece in _pieces(json.loads("{" + data)) if found else ():
                received[index, kind] = received.get((index, kind), "") + piece
        return received


def _pieces(data: dict[str, Any]) -> list[tuple[int, str, str]]:
    pieces: list[tuple[int, str, str]] = []
    for choice in data.get("choices", ()):
        delta, index, scored = choice.get("delta", choice), choice["index"], choice.get("logprobs") or {}
        pieces.append((index, "text", delta.get("content") or delta.get("text") or ""))
        pieces += [
            (index, "arguments", call["function"].get("arguments") or "") for call in delta.get("tool_calls") or ()
        ]
        pieces += [(index, "tokens", one["token"]) for one in scored.get("content") or ()]
        pieces += [(index, "tokens", token) for token in scored.get("tokens") or ()]
        pieces.append((index, "end", choice.get("finish_reason") or ""))
    if data.get("type") == "content_block_delta":
        pieces.append((data["index"], "text", data["delta"]["text"]))
    elif data.get("type") == "message_delta":
        pieces.append((0, "end", data["delta"]["stop_reason"]))
    return pieces


async def test_a_sister_goes_on_when_a_gateway_is_killed(line: Line, sister: str) -> None:
    max_tokens = 120 if is_default(line) else 200
    undisturbed = [Client([line.base_url], name, max_tokens) for name in STREAMS]
    await asyncio.gather(*[client.read() for client in undisturbed])
    clients = [Client([line.base_url, sister], name, max_tokens) for name in STREAMS]
    reading = [asyncio.create_task(client.read()) for client in clients]
    while any(len(client.events) < 5 for client in clients):
        assert not any(task.done() for task in reading), "nothing was left to lose"
        await asyncio.sleep(0.005)
    line.kill("gateway")
    try:
        await asyncio.gather(*reading)
    finally:
        line.start("gateway")
        await line.wait_ready()
    assert [client.num_breaks for client in clients] == [1] * len(clients)
    assert [client.received for client in clients] == [client.received for client in undisturbed]
