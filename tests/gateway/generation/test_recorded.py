"""Recorded responses, member by member and in order: a difference is a change of the API.

`recorded_responses.json` was recorded when the JSON was still written by hand.
"""

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CHAT_BODY = {"model": "fake", "messages": [{"role": "user", "content": "hé \"'\\\n<"}], "seed": 7, "max_tokens": 4}
TEXT_BODY = {"prompt": ["one", "t\tw\u2028o"], "seed": 2, "max_tokens": 4}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

GENERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, CHAT_BODY),
    "chat, logprobs": (CHAT, CHAT_BODY | {"logprobs": True, "top_logprobs": 2}),
    "chat, choices, token ids, a stop string": (CHAT, CHAT_BODY | {"n": 3, "return_token_ids": True, "stop": "k"}),
    "chat stream": (CHAT, CHAT_BODY | {"stream": True}),
    "chat stream, logprobs, usage": (CHAT, CHAT_BODY | {"stream": True, "logprobs": True, "top_logprobs": 2} | USAGE),
    "chat stream, choices, token ids": (CHAT, CHAT_BODY | {"stream": True, "n": 3, "return_token_ids": True}),
    "chat stream, continuous usage": (CHAT, CHAT_BODY | {"stream": True, "return_token_ids": True} | CONTINUOUS),
    "text": (TEXT, TEXT_BODY),
    "text, logprobs, choices": (TEXT, TEXT_BODY | {"logprobs": 2, "n": 2}),
    "text, token ids": (TEXT, TEXT_BODY | {"return_token_ids": True}),
    "text stream": (TEXT, TEXT_BODY | {"stream": True}),
    "text stream, logprobs, usage": (TEXT, TEXT_BODY | {"stream": True, "logprobs": 2} | USAGE),
    "text stream, choices, token ids, continuous usage": (
        TEXT,
        TEXT_BODY | {"stream": True, "n": 2, "return_token_ids": True} | CONTINUOUS,
    ),
    "text stream, a stop string": (TEXT, TEXT_BODY | {"stream": True, "stop": ["k", "a", "e"], "max_tokens": 12}),
}
OTHERS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/alias", None),
    "tokenize": ("POST", "/tokenize", {"prompt": "é漢", "return_token_strs": True}),
    "tokenize, ids only": ("POST", "/tokenize", {"prompt": "p"}),
    "detokenize": ("POST", "/detokenize", {"tokens": [104, 233]}),
    "livez": ("GET", "/livez", None),
    "health": ("GET", "/health", None),
    "unknown parameter": ("POST", CHAT, CHAT_BODY | {"temprature": 1}),
    "unsupported parameter": ("POST", CHAT, CHAT_BODY | {"audio": {}}),
    "wrong value": ("POST", TEXT, TEXT_BODY | {"n": 0}),
    "no body": ("POST", "/tokenize", None),
    "tokenize, wrong value": ("POST", "/tokenize", {"prompt": 5}),
    "detokenize, missing": ("POST", "/detokenize", {}),
    "unknown model": ("GET", "/v1/models/missing", None),
    "unknown route": ("GET", "/v1/nothing", None),
    "wrong method": ("GET", CHAT, None),
}


def parsed(text: str) -> Any:
    """JSON; times are 0."""
    return json.loads(text, object_hook=lambda members: members | ({"created": 0} if "created" in members else {}))


async def generated(client: httpx.AsyncClient, fake: FakeTokenizer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Status, content type, and the answer or the events."""
    request = client.build_request("POST", path, json=body, headers={"x-request-id": "recorded"})
    if not body.get("stream"):
        return said(await client.send(request))
    # Two tokens per step, which the fake never holds back entirely; a step for what was sent, so that none is merged.
    fake.tokens_per_step, fake.steps_left = 2, 1
    response = await client.send(request, stream=True)
    text = ""
    async for chunk in response.aiter_text():
        text += chunk
        fake.steps_left = 1
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return {
        "status": response.status_code,
        "type": response.headers["content-type"],
        "events": [parsed(event) for event in events],
    }


def said(response: httpx.Response) -> dict[str, Any]:
    return {
        "status": response.status_code,
        "type": response.headers["content-type"],
        "answer": parsed(response.text),
    }


def check(name: str, answer: dict[str, Any]) -> None:
    recorded = json.loads(Path(__file__).with_name("recorded_responses.json").read_text())[name]
    assert answer == recorded, name
    # Dictionaries are equal in any order.
    assert json.dumps(answer) == json.dumps(recorded)


@pytest.mark.parametrize("name", GENERATIONS)
async def test_generations(client: httpx.AsyncClient, fake: FakeTokenizer, name: str) -> None:
    check(name, await generated(client, fake, *GENERATIONS[name]))


async def test_errors_within_a_stream(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error_at = (2, RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, 'the "reason"'))
    answer = await generated(client, fake, CHAT, CHAT_BODY | {"stream": True, "return_token_ids": True})
    check("error within a stream", answer)


async def test_other_answers(client: httpx.AsyncClient) -> None:
    for name, (method, path, body) in OTHERS.items():
        check(name, said(await client.request(method, path, json=body)))


async def test_not_ready(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address) as client:
        await wait_ready(client)
        await fake.set_serving(False)
        check("not ready", said(await client.get("/readyz")))
