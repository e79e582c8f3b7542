"""The routes that replace weights, and how answers name the weights that made them."""

import json
from typing import Any

import grpc
import httpx
import pytest

from pagewire.gateway.operation.admin import weights
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.core.test_openapi import check
from tests.gateway.fake_tokenizer import FakeTokenizer

PATH, SGLANG = "/v1/admin/weights", "/update_weights_from_disk"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


async def test_weights_are_replaced(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    answer = await client.post(PATH, json={"model": "/b", "version": "step-2", "max_wait_seconds": 0})
    assert answer.json() == {"object": "weights", "version": "step-2", "previous_version": "d0", "executors": 2}
    (replacement,) = fake.replacements
    assert (replacement.model, replacement.version, replacement.max_wait_seconds) == ("/b", "step-2", 0)
    assert (await client.post(PATH, json={"model": "org/name", "revision": "v2"})).json()["version"] == "d1"
    assert fake.replacements[1].revision == "v2" and not fake.replacements[1].HasField("max_wait_seconds")


async def test_sglangs_clients_do_the_same(
    client: httpx.AsyncClient, fake: FakeTokenizer, document: dict[str, Any]
) -> None:
    body = {"model_path": "/b", "weight_version": "7", "abort_all_requests": True, "flush_cache": True}
    answer = (await client.post(SGLANG, json=body)).json()
    assert answer == {"success": True, "message": "weights 7 are in force", "num_paused_requests": 0}
    assert fake.replacements[0].max_wait_seconds == 0 and fake.replacements[0].HasField("max_wait_seconds")
    fake.weights_problem = RpcError(grpc.StatusCode.INVALID_ARGUMENT, "they are damaged")
    failed = await client.post(SGLANG, json=body)
    assert failed.status_code == 400
    assert failed.json() == {"success": False, "message": "they are damaged", "num_paused_requests": 0}
    check(document, SGLANG, "post", 400, "application/json", failed.json())


@pytest.mark.parametrize(("path", "name"), [(PATH, "model"), (SGLANG, "model_path")])
async def test_a_repeated_call_is_known_again_and_a_new_one_is_not(
    client: httpx.AsyncClient, fake: FakeTokenizer, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    monkeypatch.setattr(weights, "_PAUSES_S", (0.0,))
    fake.breaks_replacement = True
    for _ in range(2):
        assert (await client.post(path, json={name: "/b"})).status_code == 200
    broken, repeated, new = fake.replacements
    assert repeated == broken and broken.request_id
    assert new.request_id not in ("", broken.request_id)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.FAILED_PRECONDITION, 409),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 507),
        (grpc.StatusCode.UNAVAILABLE, 503),
    ],
)
async def test_a_refusal_says_why(
    client: httpx.AsyncClient, fake: FakeTokenizer, code: grpc.StatusCode, status: int
) -> None:
    fake.weights_problem = RpcError(code, "this is why")
    answer = await client.post(PATH, json={"model": "/b"})
    assert answer.status_code == status and answer.json()["error"]["message"] == "this is why"


@pytest.mark.parametrize(
    "body", [{}, {"model": ""}, {"model": "/b", "version": "a b"}, {"model": "/b", "max_wait_seconds": -1}, {"path": 1}]
)
async def test_a_wrong_body_is_refused(client: httpx.AsyncClient, fake: FakeTokenizer, body: dict[str, Any]) -> None:
    assert (await client.post(PATH, json=body)).status_code == 400
    assert not fake.replacements


async def test_only_keys_that_may_change_the_service_do(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, api_key="secret") as client:
        await wait_ready(client)
        for path, body in ((PATH, {"model": "/b"}), (SGLANG, {"model_path": "/b"})):
            assert (await client.post(path, json=body)).status_code == 401
            allowed = await client.post(path, json=body, headers={"Authorization": "Bearer secret"})
            assert allowed.status_code == 200


def fingerprints(text: str) -> set[str | None]:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return {json.loads(event)["system_fingerprint"] for event in events}


async def test_answers_and_every_event_name_the_weights(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi", "max_tokens": 8})):
        fake.weights_version = "d0"
        assert (await client.post(path, json=body)).json()["system_fingerprint"] == "d0"
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
        assert fingerprints((await client.post(path, json=streamed)).text) == {"d0"}
        fake.weights_version = "d1"
        assert (await client.post(path, json=body)).json()["system_fingerprint"] == "d1"
    for path, body in (("/v1/messages", CHAT), ("/v1/responses", {"input": "hi"}), ("/v1/chat/completions", CHAT)):
        for stream in (False, True):
            answer = await client.post(path, json=body | {"stream": stream})
            assert answer.headers["x-weights-version"] == "d1"
    native = {"text": "hi", "sampling_params": {"max_new_tokens": 4}}
    assert (await client.post("/generate", json=native)).json()["meta_info"]["weight_version"] == "d1"


async def test_a_resumed_request_says_whose_tokens_it_has(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """The version prevents other weights from continuing the request."""
    fake.weights_version, fake.break_at = "d0", 6
    answer = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 60})
    assert answer.json()["system_fingerprint"] == "d0"
    first, second = fake.submissions
    assert (first.weights_version, second.weights_version) == ("", "d0")
    assert second.resume_token_ids


async def test_a_kept_generation_goes_on_with_its_weights_at_another_gateway(fake: FakeTokenizer, address: str) -> None:
    fake.weights_version = "d0"
    key = {"Idempotency-Key": "k"}
    body = CHAT | {"stream": True, "max_tokens": 40}
    async with running_gateway(address) as client:
        await wait_ready(client)
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=key) as answer:
            lines = answer.aiter_lines()
            while '"content":"' not in await anext(lines):
                pass
    fake.weights_version = "d1"
    async with running_gateway(address) as client:
        await wait_ready(client)
        text = (await client.post("/v1/chat/completions", json=body, headers=key)).text
        resumed = next(one for one in fake.submissions if one.resume_token_ids)
        assert resumed.weights_version == "d0"
        assert "d0" in fingerprints(text)
