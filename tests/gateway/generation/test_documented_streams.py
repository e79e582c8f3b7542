"""The bytes of streams beside those that OpenAI's API reference shows.

All documented members are there, in order; test_tools.py covers tools. Members that we add are named here; values
that always differ (ids, times, names of models, counts) are compared by type.
"""

import copy
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pagewire.wire.rpc import RpcError
from tests.gateway.fake_tokenizer import FakeTokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello!"}]
OURS = {"stop_reason", "prompt_tokens_details", "completion_tokens_details", "cached_tokens", "reasoning_tokens"}
BY_KIND = {"id", "created", "model", "system_fingerprint", "prompt_tokens", "total_tokens", "logprob"}
DOCUMENTED = json.loads(Path(__file__).with_name("documented_streams.json").read_text())


def agree(documented: Any, said: Any, where: str) -> None:
    """Raises AssertionError for a documented member that is missing, has another value or another place."""
    if isinstance(documented, dict):
        names = [name for name in said if name in documented]
        assert sorted(names) == sorted(documented), f"{where}: {said}"
        assert said.keys() - documented.keys() <= OURS, f"{where}: {said}"
        for name, value in documented.items():
            if name not in BY_KIND:
                agree(value, said[name], f"{where}.{name}")
            elif said[name] is not None:
                assert type(said[name]) is type(value), f"{where}.{name}: {said[name]}"
    elif isinstance(documented, list):
        assert len(documented) == len(said), f"{where}: {said}"
        for position, (one, other) in enumerate(zip(documented, said, strict=True)):
            agree(one, other, f"{where}[{position}]")
    else:
        assert (said, type(said)) == (documented, type(documented)), where


def events(stream: bytes) -> list[Any]:
    """Each is one line and an empty one; the last one says that it is."""
    *lines, rest = stream.split(b"\n\n")
    assert rest == b"" and lines.pop() == b"data: [DONE]"
    assert all(line.startswith(b"data: {") and b"\n" not in line and b"\r" not in line for line in lines)
    return [json.loads(line[6:]) for line in lines]


def joined(stream: list[Any]) -> list[Any]:
    """Returns a stream in which chunks that only add text are joined, as their sizes are not specified."""
    result: list[Any] = []
    for event in copy.deepcopy(stream):
        if result and (held := added(result[-1])) and (more := added(event)) and held[1:] == more[1:]:
            (holder, name), (adding, _) = held[0], more[0]
            holder[name] += adding[name]
        else:
            result.append(event)
    return result


def added(event: Any) -> Any:
    """Returns the place of the text in a chunk with nothing else, and the choice that it belongs to."""
    match event.get("choices"):
        case [{"index": index, "delta": {"content": str(), **rest} as delta, "finish_reason": None}] if not rest:
            return (delta, "content"), index
        case [{"index": index, "delta": {"tool_calls": [{"index": call, "function": {"arguments": str(), **rest}}]}}]:
            function = event["choices"][0]["delta"]["tool_calls"][0]["function"]
            return ((function, "arguments"), index, call) if not rest else None
        case [{"index": index, "text": str(), "finish_reason": None} as choice]:
            return (choice, "text"), index
    return None


def check(name: str, stream: bytes) -> None:
    said = events(stream)
    for position, (one, other) in enumerate(zip(joined(DOCUMENTED[name]), joined(said), strict=True)):
        agree(one, other, f"{name}[{position}]")
    assert len({event["id"] for event in said if "id" in event}) == 1


async def stream_of(client: httpx.AsyncClient, path: str = CHAT, **body: Any) -> bytes:
    response = await client.post(path, json={"stream": True} | body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return response.content


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if "tool" not in name and "error" not in name])
async def test_text(client: httpx.AsyncClient, fake: FakeTokenizer, name: str) -> None:
    path, text = (CHAT, "Hello there.|") if name.startswith("chat") else (TEXT, "This is it.|")
    fake.generate = lambda prompt, seed, num_tokens: text[:num_tokens]
    body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Say it."}
    body |= {"stop": "|"} if "logprobs" not in name else {"max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    if "usage" in name:
        body["stream_options"] = {"include_usage": True}
    check(name, await stream_of(client, path, **body))


async def test_several_choices_are_each_as_one_would_be(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.generate = lambda prompt, seed, num_tokens: "Hello there.|"
    said = events(await stream_of(client, messages=MESSAGES, stop="|", n=3))
    assert all(len(event["choices"]) == 1 for event in said)
    for index in range(3):
        own = [event for event in said if event["choices"][0]["index"] == index]
        for one, other in zip(joined(DOCUMENTED["chat"]), joined(own), strict=True):
            one["choices"][0]["index"] = index
            agree(one, other, f"choice {index}")


async def test_an_error_is_the_last_event(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    error = DOCUMENTED["an error"][-1]["error"]
    fake.generate = lambda prompt, seed, num_tokens: "Hello there."
    fake.error_at = (5, RpcError(grpc.StatusCode.INTERNAL, error["message"]))
    check("an error", await stream_of(client, messages=MESSAGES))
