"""The routes that load and unload adapters, and how answers name the adapter that made them."""

import json
from typing import Any

import grpc
import httpx
import pytest

from pagewire.v1 import common_pb2
from pagewire.wire.rpc import RpcError
from tests.gateway.core.test_openapi import check
from tests.gateway.fake_tokenizer import FakeTokenizer

ROUTE, LOAD, UNLOAD = "/v1/admin/adapters/org/x", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
X = {
    "object": "adapter",
    "name": "org/x",
    "path": "/x",
    "digest": "0123456789abcdef",
    "rank": 8,
    "base_model": "base",
}
X_ADAPTER = common_pb2.Adapter(name="x", path="/x", digest="fedcba987654")


async def test_an_adapter_is_loaded_described_and_unloaded(
    client: httpx.AsyncClient, fake: FakeTokenizer, document: dict[str, Any]
) -> None:
    path = "/v1/admin/adapters/{name}"
    assert (await client.get(ROUTE)).status_code == 404
    answer = await client.put(ROUTE, json={"path": "/x"})
    assert answer.json() == X
    check(document, path, "put", 200, "application/json", answer.json())
    assert (await client.get(ROUTE)).json() == X
    assert (await client.delete(ROUTE)).status_code == 204
    missing = await client.delete(ROUTE)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "adapter_not_found")
    check(document, path, "delete", 404, "application/json", missing.json())


async def test_an_adapter_is_replaced_on_request(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    await client.put(ROUTE, json={"path": "/x", "replaces": True})
    await client.post(LOAD, json={"lora_name": "y", "lora_path": "/y", "load_inplace": True})
    assert [call.replaces for call in fake.adapter_calls] == [True, True]


async def test_vllms_clients_do_the_same(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    answer = await client.post(LOAD, json={"lora_name": "x", "lora_path": "/x"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    answer = await client.post(UNLOAD, json={"lora_name": "x", "lora_int_id": 3})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
    assert (await client.post(UNLOAD, json={"lora_name": "x"})).status_code == 404


@pytest.mark.parametrize(
    ("code", "status", "of_vllm"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400, 400),
        (grpc.StatusCode.NOT_FOUND, 404, 404),
        (grpc.StatusCode.ALREADY_EXISTS, 409, 400),
        (grpc.StatusCode.FAILED_PRECONDITION, 409, 400),
    ],
)
async def test_a_refusal_says_why(
    client: httpx.AsyncClient, fake: FakeTokenizer, code: grpc.StatusCode, status: int, of_vllm: int
) -> None:
    fake.adapter_problem = RpcError(code, "this is why")
    answer = await client.put(ROUTE, json={"path": "/x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, "this is why")
    answer = await client.post(LOAD, json={"lora_name": "x", "lora_path": "/x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (of_vllm, "this is why")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (LOAD, {}),
        (LOAD, {"lora_name": "x"}),
        (LOAD, {"lora_name": "", "lora_path": "/x"}),
        (LOAD, {"lora_name": "x", "lora_path": ""}),
        (LOAD, {"lora_name": "x", "lora_path": "/x", "more": 1}),
        (UNLOAD, {}),
    ],
)
async def test_a_wrong_body_is_refused(
    client: httpx.AsyncClient, fake: FakeTokenizer, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(path, json=body)).status_code == 400
    assert (await client.put(ROUTE, json={"path": ""})).status_code == 400
    assert not fake.adapter_calls


@pytest.mark.parametrize("name", ["name", "path"])
async def test_vllms_clients_read_their_own_names(client: httpx.AsyncClient, fake: FakeTokenizer, name: str) -> None:
    fake.adapter_problem = RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"{name}: no", [(name, f"{name}: no")])
    error = (await client.post(LOAD, json={"lora_name": "x", "lora_path": "/x"})).json()["error"]
    assert (error["message"], error["param"]) == (f"lora_{name}: no", f"lora_{name}")
    error = (await client.put(ROUTE, json={"path": "/x"})).json()["error"]
    assert (error["message"], error["param"]) == (f"{name}: no", name)


@pytest.mark.parametrize("end", ["%0A", "%0a%0a", "%00", "%0D%0A", "%1f", "%C2%85"])
async def test_a_route_with_control_characters_is_refused(
    client: httpx.AsyncClient, fake: FakeTokenizer, end: str
) -> None:
    fake.adapters["x"] = X_ADAPTER
    for method, route in (("DELETE", "/v1/admin/adapters/x"), ("GET", "/v1/models/x"), ("GET", "/v1/models")):
        refused = await client.request(method, route + end)
        assert refused.status_code == 400
        assert "control character; leave it out" in refused.json()["error"]["message"]
    assert "x" in fake.adapters and not fake.adapter_calls


async def test_adapters_are_listed_with_their_parent(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    await client.post(LOAD, json={"lora_name": "x", "lora_path": "/x"})
    models = (await client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        ("fake", "fake", None),
        ("alias", "fake", None),
        ("x", "/x", "fake"),
    ]
    for name in ("x", "fake:x"):
        model = (await client.get(f"/v1/models/{name}")).json()
        assert (model["id"], model["parent"]) == ("x", "fake")
    for name in ("nothing", "fake:nothing", "x:fake"):
        missing = await client.get(f"/v1/models/{name}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_body_that_is_nested_too_deeply_is_refused(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    answer = await client.put(ROUTE, content=b"[" * 10_000, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body is nested too deeply")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"model": "x"}),
        ("/v1/chat/completions", CHAT | {"lora_path": "x"}),
        ("/v1/chat/completions", CHAT | {"model": "fake", "lora_path": "x"}),
        ("/v1/completions", {"prompt": "a", "model": "x", "max_tokens": 3}),
    ],
)
async def test_answers_name_the_adapter_and_its_contents(
    client: httpx.AsyncClient, fake: FakeTokenizer, path: str, body: dict[str, Any]
) -> None:
    fake.weights_version = "w1"
    await client.post(LOAD, json={"lora_name": "x", "lora_path": "/x"})
    answer = (await client.post(path, json=body)).json()
    assert (answer["model"], answer["system_fingerprint"]) == ("x", "w1+0123456789ab")
    streamed = await client.post(path, json=body | {"stream": True})
    assert streamed.headers["x-weights-version"] == "w1+0123456789ab"
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert {(event["model"], event["system_fingerprint"]) for event in events} == {("x", "w1+0123456789ab")}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("x", 200, ""),
        ("fake:x", 200, ""),
        ("alias", 200, ""),
        ("", 200, ""),
        (None, 200, ""),
        ("y", 400, "model and lora_path name different adapters: give one of them"),
        ("fake:y", 400, "model and lora_path name different adapters: give one of them"),
        ("nothing", 404, "the model 'nothing' does not exist; served here: fake, alias, x, y"),
        ("fake:nothing", 404, "the model 'nothing' does not exist; served here: fake, alias, x, y"),
    ],
)
async def test_a_request_names_one_adapter(
    client: httpx.AsyncClient, fake: FakeTokenizer, path: str, model: str | None, status: int, message: str
) -> None:
    fake.adapters |= {"x": X_ADAPTER, "y": X_ADAPTER}
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    answer = await client.post(path, json=prompt | {"max_tokens": 3, "model": model, "lora_path": "x"})
    assert (answer.status_code, answer.json().get("error", {}).get("message", "")) == (status, message)
    assert status != 200 or (answer.json()["model"], fake.received[0].model) == ("x", "x")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "x"}),
        ("/v1/responses", {"input": "hi", "model": "x", "max_output_tokens": 3, "store": False}),
        ("/generate", {"text": "hi", "lora_path": "x"}),
    ],
)
async def test_every_api_takes_adapters(
    client: httpx.AsyncClient, fake: FakeTokenizer, path: str, body: dict[str, Any]
) -> None:
    fake.adapters["x"] = X_ADAPTER
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert fake.received[0].model == "x"
    if "model" in body:
        assert answer.json()["model"] == "x"


async def test_an_unknown_name_is_no_model(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "nothing"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_resubmitted_request_keeps_its_contents(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.adapters["x"] = X_ADAPTER
    fake.break_at = 3
    answer = (await client.post("/v1/chat/completions", json=CHAT | {"model": "x"})).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert [one.adapter_digest for one in fake.submissions] == ["", X_ADAPTER.digest]
