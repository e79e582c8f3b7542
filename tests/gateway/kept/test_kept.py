"""Generations that outlive their connection: an Idempotency-Key, Last-Event-ID, and gateways that die."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.gateway.responses.test_background_responses import ended
from tests.gateway.responses.test_responses import THINKS_SAYS_CALLS, TOOL
from tests.sweep import examples

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 24}
PROMPT = "<user>hi<assistant>"
KEY = {"Idempotency-Key": "k1"}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CHAT_TOOL = {"type": "function", "function": {"name": TOOL["name"], "parameters": TOOL["parameters"]}}

# path, body, whether the fake thinks and calls
KINDS = {
    "chat": (CHAT, BODY | USAGE, False),
    "two choices": (CHAT, BODY | USAGE | {"n": 2, "logprobs": True, "top_logprobs": 2}, False),
    "tools": (CHAT, BODY | {"tools": [CHAT_TOOL]}, True),
    "completion": (
        "/v1/completions",
        {"prompt": ["ab", "c"], "stream": True, "logprobs": 1, "echo": True} | USAGE,
        False,
    ),
    "message": ("/v1/messages", {"messages": BODY["messages"], "max_tokens": 24, "stream": True}, False),
    "message with calls": (
        "/v1/messages",
        {
            "messages": BODY["messages"],
            "max_tokens": 24,
            "stream": True,
            "tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}],
        },
        True,
    ),
    "response": ("/v1/responses", {"input": "hi", "max_output_tokens": 24, "stream": True}, False),
    "response with calls": (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 24, "stream": True, "tools": [TOOL], "store": False},
        True,
    ),
}


def events(text: str) -> list[str]:
    return text.split("\n\n")[:-1]


def timeless(text: str) -> str:
    """Returns the text without the time at which a response was completed."""
    return re.sub(r'"completed_at":[0-9.]+', "", text)


def id_of(event: str) -> str:
    [id] = [line.removeprefix("id: ") for line in event.split("\n") if line.startswith("id: ")]
    return id


def said(text: str) -> str:
    """Returns the text of the first choice of a streamed chat."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    choices = [choice for one in data for choice in json.loads(one)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices if not choice["index"])


async def read_until(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], num_events: int, **headers: str
) -> str:
    """Whole events, at least so many; then the connection is gone."""
    text = ""
    async with client.stream("POST", path, json=body, headers=headers) as response:
        async for piece in response.aiter_text():
            text += piece
            if text.count("\n\n") >= num_events:
                break
    return text[: text.rindex("\n\n") + 2]


async def test_the_same_key_is_the_same_generation(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    first = await client.post(CHAT, json=BODY, headers=KEY)
    again = await client.post(CHAT, json=BODY, headers=KEY)
    assert again.text == first.text
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert len(fake.received) == 1
    body = BODY | {"stream": False}
    whole = await client.post(CHAT, json=body, headers={"Idempotency-Key": "k2"})
    assert (await client.post(CHAT, json=body, headers={"Idempotency-Key": "k2"})).content == whole.content
    assert len(fake.received) == 2
    assert whole.json()["choices"][0]["message"]["content"] != said(first.text)  # no seed is given: it is another


async def test_a_key_is_of_one_request(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    await client.post(CHAT, json=BODY, headers=KEY)
    refused = await client.post(CHAT, json=BODY | {"max_tokens": 23}, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert refused.json()["error"]["type"] == "invalid_request_error"
    other_path = await client.post("/v1/completions", json={"prompt": "hi"}, headers=KEY)
    assert other_path.status_code == 422
    other_client = await client.post(CHAT, json=BODY | {"max_tokens": 23}, headers=KEY | {"Authorization": "Bearer b"})
    assert other_client.status_code == 200
    reordered = json.dumps(dict(reversed(BODY.items())), indent=1)
    headers = KEY | {"Content-Type": "application/json"}
    assert (await client.post(CHAT, content=reordered, headers=headers)).status_code == 200
    assert len(fake.received) == 2


async def test_other_streams_have_no_ids(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    assert "id: " not in (await client.post(CHAT, json=BODY)).text


@pytest.mark.parametrize("kind", KINDS)
async def test_any_gateway_goes_on_after_the_last_event(fake: FakeTokenizer, address: str, kind: str) -> None:
    """Both texts together are the undisturbed text, wherever the first gateway stopped."""
    path, body, calls = KINDS[kind]
    body = body if path == "/v1/messages" else body | {"seed": 3}
    fake.script = THINKS_SAYS_CALLS if calls else None
    fake.step_s = 0.001
    async with running_gateway(address) as first, running_gateway(address) as second:
        await wait_ready(first)
        await wait_ready(second)
        whole = (await first.post(path, json=body, headers=KEY)).text
        ids = [id_of(event) for event in events(whole)]
        assert len(ids) == len(set(ids)) > 5, "a slow gateway merges events, but keeps more than five of ten"
        for number in range(1, len(ids), 5):
            key = f"{kind} {number}"
            headers = {"Idempotency-Key": key}
            begun = await read_until(first, path, body, number, **headers)
            last = id_of(events(begun)[-1])
            rest = await second.post(path, json=body, headers={"Last-Event-ID": last})
            again = await second.post(path, json=body, headers=headers)
            assert timeless(begun + rest.text) == timeless(again.text)
            assert timeless((await first.post(path, json=body, headers=headers)).text) == timeless(again.text)
            if kind == "chat":
                assert said(again.text) == expected_text(PROMPT, 3)
    again_submitted = [one for one in fake.submissions if one.resubmitted and not one.request.request_id.endswith("-1")]
    assert all(one.resume_token_ids for one in again_submitted), "other choices are let in with the first"


async def test_a_gateway_that_stops_breaks_off_what_another_can_continue(fake: FakeTokenizer, address: str) -> None:
    """An error in the stream would be the client's answer; a broken connection is what clients resume."""
    leave = asyncio.Event()
    body, text = BODY | {"seed": 3}, ""
    async with running_gateway(address) as stays:
        await wait_ready(stays)
        async with running_gateway(address, leave, shutdown_timeout=0.1) as stops:
            await wait_ready(stops)
            fake.step_s = 0.02
            with pytest.raises(httpx.RemoteProtocolError, match="closed connection"):
                async with stops.stream("POST", CHAT, json=body, headers=KEY) as response:
                    async for piece in response.aiter_text():
                        text += piece
                        if not leave.is_set() and text.count("\n\n") >= 3:
                            fake.running.clear()
                            leave.set()
        assert "error" not in text and said(text)
        fake.running.set()
        rest = await stays.post(CHAT, json=body, headers={"Last-Event-ID": id_of(events(text)[-1])})
        assert said(text + rest.text) == expected_text(PROMPT, 3)


async def test_a_response_with_a_key_is_made_and_stored_once(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = {"input": "hi", "max_output_tokens": 24}
    first = await client.post("/v1/responses", json=body, headers=KEY)
    again = await client.post("/v1/responses", json=body, headers=KEY)
    assert again.content == first.content
    stored = await client.get(f"/v1/responses/{first.json()['id']}")
    assert stored.content == first.content
    behind = [
        (await client.post("/v1/responses", json=body | {"background": True}, headers={"Idempotency-Key": "k2"})).json()
        for _ in range(2)
    ]
    assert behind[0]["id"] == behind[1]["id"] != first.json()["id"]

    await ended(client, behind[0]["id"])
    assert len(fake.received) == 2


async def test_requests_at_once_share_one_generation(fake: FakeTokenizer, address: str) -> None:
    fake.steps_left = 5
    async with running_gateway(address) as first, running_gateway(address) as second:
        await wait_ready(first)
        await wait_ready(second)
        async with (
            first.stream("POST", CHAT, json=BODY, headers=KEY) as one,
            first.stream("POST", CHAT, json=BODY, headers=KEY) as two,
            second.stream("POST", CHAT, json=BODY, headers=KEY) as three,
        ):
            fake.steps_left = None
            texts = ["".join([piece async for piece in stream.aiter_text()]) for stream in (one, two, three)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].endswith("data: [DONE]\n\n")
    assert len(fake.received) == 1


async def test_a_generation_without_clients_rests(fake: FakeTokenizer, client: httpx.AsyncClient) -> None:
    fake.steps_left = 5
    await read_until(client, CHAT, BODY, 2, **KEY)
    await eventually(lambda: fake.aborted)
    fake.steps_left = None
    assert (await client.post(CHAT, json=BODY, headers=KEY)).text.endswith("data: [DONE]\n\n")
    assert fake.submissions[-1].resume_token_ids


async def test_an_error_is_no_answer(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
    assert (await client.post(CHAT, json=BODY, headers=KEY)).status_code == 429
    fake.error = None
    fake.error_at = (5, RpcError(grpc.StatusCode.INTERNAL, "it broke"))
    broken = (await client.post(CHAT, json=BODY, headers=KEY)).text
    assert "it broke" in broken
    *before, error, _ = events(broken)
    assert "id: " not in error
    fake.error_at = None
    rest = await client.post(CHAT, json=BODY, headers={"Last-Event-ID": id_of(before[-1])})
    whole = await client.post(CHAT, json=BODY, headers=KEY)
    assert "\n\n".join(before) + "\n\n" + rest.text == whole.text


async def test_ids_that_mean_nothing_are_refused(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    text = (await client.post(CHAT, json=BODY, headers=KEY)).text
    id = id_of(events(text)[3])

    async def code(**headers: str) -> int:
        return (
            await client.post(CHAT, json=BODY, headers={k.replace("_", "-"): v for k, v in headers.items()})
        ).status_code

    assert await code(Last_Event_ID="17") == 400
    assert await code(Last_Event_ID="0" * 32 + "-3") == 404
    assert await code(Last_Event_ID=id, Authorization="Bearer other") == 404
    assert await code(Last_Event_ID=id, Idempotency_Key="another") == 400
    assert await code(Idempotency_Key="x" * 256) == 400
    assert await code(Last_Event_ID="") == 200
    end = await client.post(CHAT, json=BODY, headers={"Last-Event-ID": id_of(events(text)[-1])})
    assert (end.status_code, end.text) == (200, "")
    assert len(fake.received) == 2


async def test_the_oldest_make_room(fake: FakeTokenizer, address: str, tmp_path: Path) -> None:
    bounds = {"max_stored_generations": 2, "generation_store": "memory"}
    async with running_gateway(address, **bounds) as client:
        await wait_ready(client)
        for key in ("a", "b", "c", "b", "a"):
            await client.post(CHAT, json=BODY, headers={"Idempotency-Key": key})
        assert len(fake.received) == 4
    async with running_gateway(address, generation_store_ttl=0.001) as client:
        await wait_ready(client)
        for _ in range(2):
            await client.post(CHAT, json=BODY, headers=KEY)
        assert len(fake.received) == 6
    async with running_gateway(address, generation_store="memory", generation_store_size=1500) as client:
        await wait_ready(client)
        response = await client.post(CHAT, json=BODY | {"max_tokens": 300}, headers=KEY)
        assert "--generation-store-size" in response.text


async def test_all_streams_can_be_kept(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, resumable_streams=True) as client:
        await wait_ready(client)
        body = BODY | {"max_tokens": 900}  # its client leaves before the end
        begun = await read_until(client, CHAT, body, 6)
        await eventually(lambda: not fake.live)
        rest = await client.post(CHAT, json=body, headers={"Last-Event-ID": id_of(events(begun)[-1])})
        [first, *again] = fake.submissions
        assert said(begun + rest.text) == expected_text(PROMPT, first.request.sampling_params.seed, 900)
        assert [one.resubmitted for one in again] == [True]


async def test_a_search_is_made_once(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "best_of": 3}
    first = await client.post("/v1/completions", json=body, headers=KEY)
    assert first.status_code == 200
    assert (await client.post("/v1/completions", json=body, headers=KEY)).content == first.content
    assert len(fake.searches) == 2


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 20), max_size=4), tokens_per_step=st.integers(1, 4), n=st.integers(1, 3))
async def test_any_number_of_cuts(
    client: httpx.AsyncClient, fake: FakeTokenizer, cuts: list[int], tokens_per_step: int, n: int
) -> None:
    """Each connection is cut after so many events of its own."""
    fake.received.clear()
    fake.tokens_per_step = tokens_per_step
    headers = {"Idempotency-Key": f"{cuts} {tokens_per_step} {n}"}
    body = BODY | {"n": n, "seed": 3}
    text, last = "", {}
    for cut in cuts:
        text += await read_until(client, CHAT, body, cut, **(headers | last)) if not text.endswith("[DONE]\n\n") else ""
        last = {"Last-Event-ID": id_of(events(text)[-1])}
    text += (await client.post(CHAT, json=body, headers=headers | last)).text
    assert text == (await client.post(CHAT, json=body, headers=headers)).text
    assert said(text) == expected_text(PROMPT, 3)
