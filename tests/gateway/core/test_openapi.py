"""The answers of routes match /openapi.json."""

import asyncio
import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import httpx
import jsonschema
import pytest

from pagewire.gateway.core.openapi import DocumentedApp
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.operation.bodies import Version
from pagewire.process.worker_process import WorkerDiedError
from pagewire.wire.rpc import RpcError
from tests.gateway.fake_tokenizer import FakeTokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_BODY = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stop": "a", "n": 3}
TEXT_BODY = {"prompt": ["p", "q"], "logprobs": 2, "stop": "a", "n": 3}


def check(document: dict[str, Any], route: str, method: str, status: int, media_type: str, value: Any) -> None:
    """Checks a value against the schema of a route."""
    responses = document["paths"][route][method]["responses"]
    response = responses.get(str(status), responses["default"])
    schema = response["content"][media_type]["schema"]
    if media_type == "text/event-stream":
        data = schema["properties"]["data"]
        schema = data.get("else", data)["contentSchema"]
    schema = schema | {"components": document["components"]}
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


async def test_the_document_is_built_once_although_a_request_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end, num_built = threading.Event(), threading.Event(), 0

    def build(app: DocumentedApp) -> bytes:
        nonlocal num_built
        num_built += 1
        has_begun.set()
        may_end.wait()
        return b"{}"

    monkeypatch.setattr(DocumentedApp, "_built_elsewhere", build)
    app = DocumentedApp(document_url="/openapi.json", same=partial(DocumentedApp, document_url=None))
    # In this process, where a task that is cancelled is the request's own.
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
    leaving = asyncio.create_task(client.get("/openapi.json"))
    await asyncio.to_thread(has_begun.wait)
    leaving.cancel()
    await asyncio.wait([leaving])
    waiting = asyncio.create_task(client.get("/openapi.json"))
    may_end.set()
    assert (await waiting).content == (await client.get("/openapi.json")).content == b"{}"
    assert num_built == 1
    await client.aclose()


async def test_a_document_that_was_not_built_is_built_again(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = iter([WorkerDiedError("builder died"), b"{}"])

    def build(app: DocumentedApp) -> bytes:
        if isinstance(built := next(builds), Exception):
            raise built
        return built

    monkeypatch.setattr(DocumentedApp, "_built_elsewhere", build)
    assert (await client.get("/openapi.json")).status_code == 500
    assert (await client.get("/openapi.json")).content == b"{}"


async def test_documents(client: httpx.AsyncClient, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def stall(app: DocumentedApp) -> dict[str, Any]:
        raise AssertionError("streams would stand still while this process builds the document")

    monkeypatch.setattr(DocumentedApp, "openapi", stall)
    assert (await client.get("/docs")).status_code == 200
    asked = await asyncio.gather(client.get("/openapi.json"), client.get("/openapi.json"))
    assert [one.json() for one in asked] == [document] * 2
    wrong = await client.put("/v1/files")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST")
    responses = document["paths"][CHAT]["post"]["responses"]
    assert {"400", "401", "404", "429", "503"} <= set(responses)
    assert "422" not in responses
    assert responses["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorResponse")
    success = responses["200"]["content"]
    assert success["application/json"]["schema"]["$ref"].endswith("/ChatCompletion")
    assert "/ChatCompletionChunk" in json.dumps(success["text/event-stream"])
    schemas = document["components"]["schemas"]
    asked = schemas["ChatCompletionRequest"]["properties"]
    assert asked["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 3.4028234663852886e38}
    assert asked["seed"]["anyOf"][0] == {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    # What is always there is required, whether or not a type has a value for it.
    assert {"id", "object", "system_fingerprint"} <= set(schemas["ChatCompletion"]["required"])
    assert "prompt_token_ids" not in schemas["ChatCompletion"]["required"]


async def test_every_schema_is_one_that_a_route_uses(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    used: set[str] = set()
    pending = list(references(document["paths"]))
    while pending:
        name = pending.pop()
        if name not in used:
            used.add(name)
            pending += references(schemas[name])
    assert used == set(schemas)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].removeprefix("#/components/schemas/")
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from references(one)


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}])
@pytest.mark.parametrize(("route", "body"), [(CHAT, CHAT_BODY), (TEXT, TEXT_BODY)])
async def test_generations(
    client: httpx.AsyncClient, document: dict[str, Any], route: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    whole = await client.post(route, json=body | extra)
    check(document, route, "post", whole.status_code, "application/json", whole.json())
    for options in ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        stream = {"stream": True} | ({"stream_options": options} if options else {})
        streamed = await client.post(route, json=body | extra | stream)
        *events, done = [event.removeprefix("data: ") for event in streamed.text.split("\n\n") if event]
        assert done == "[DONE]"
        for event in events:
            check(document, route, "post", 200, "text/event-stream", json.loads(event))


async def test_other_answers_and_errors(
    client: httpx.AsyncClient, document: dict[str, Any], fake: FakeTokenizer
) -> None:
    for method, route, path, body in [
        ("get", "/v1/models", "/v1/models", None),
        ("get", "/v1/models/{model}", "/v1/models/fake", None),
        ("get", "/v1/models/{model}", "/v1/models/missing", None),
        ("post", "/tokenize", "/tokenize", {"prompt": "p"}),
        ("post", "/tokenize", "/tokenize", {"prompt": "p", "return_token_strs": True}),
        ("post", "/tokenize", "/tokenize", {"prompt": 5}),
        ("post", "/v1/tokenize", "/v1/tokenize", {"prompt": ["p", "q"], "return_token_strs": True}),
        ("post", "/v1/detokenize", "/v1/detokenize", {"tokens": [[97], [98]]}),
        ("post", "/detokenize", "/detokenize", {"tokens": [97]}),
        ("post", "/v1/embeddings", "/v1/embeddings", {"input": ["p", "q"]}),
        ("post", "/v1/embeddings", "/v1/embeddings", {"input": "p", "encoding_format": "base64"}),
        ("post", "/v1/embeddings", "/v1/embeddings", {"input": "p", "encoding_format": "bytes"}),
        ("post", "/pooling", "/pooling", {"input": "p"}),
        ("post", "/v1/pooling", "/v1/pooling", {"input": "p", "task": "classify"}),
        ("post", "/classify", "/classify", {"input": "p"}),
        ("post", "/v1/classify", "/v1/classify", CHAT_BODY),
        ("post", "/score", "/score", {"text_1": "p", "text_2": ["q", "r"]}),
        ("post", "/v1/score", "/v1/score", {"queries": "p", "items": {"text": "q"}}),
        ("post", "/rerank", "/rerank", {"query": "p", "documents": ["q", {"text": "r"}]}),
        ("post", "/v1/rerank", "/v1/rerank", {"query": "p", "documents": ["q"], "return_documents": False}),
        ("post", "/v2/rerank", "/v2/rerank", {"query": "p", "documents": []}),
        ("post", "/v2/embed", "/v2/embed", {"texts": ["p"], "embedding_types": ["float", "binary", "base64"]}),
        ("post", "/v2/embed", "/v2/embed", {"texts": ["p"], "embedding_types": ["int8"]}),
        ("get", "/v1/files", "/v1/files?limit=5", None),
        ("get", "/v1/files", "/v1/files?limit=-5", None),
        ("get", "/v1/files/{file_id}", "/v1/files/unknown", None),
        ("post", "/v1/files", "/v1/files", {}),
        ("post", "/v1/responses", "/v1/responses", {"input": "hi"}),
        ("post", "/v1/responses", "/v1/responses", {"input": 5}),
        ("get", "/v1/responses/{response_id}", "/v1/responses/unknown", None),
        ("get", "/v1/responses/{response_id}/input_items", "/v1/responses/unknown/input_items?limit=5", None),
        ("delete", "/v1/responses/{response_id}", "/v1/responses/unknown", None),
        ("post", "/v1/responses", "/v1/responses", {"input": "hi", "background": True}),
        ("post", "/v1/responses/input_tokens", "/v1/responses/input_tokens", {"input": "hi"}),
        ("post", "/v1/responses/{response_id}/cancel", "/v1/responses/unknown/cancel", None),
        ("get", "/livez", "/livez", None),
        ("get", "/health", "/health", None),
        ("get", "/version", "/version", None),
        ("post", "/abort_requests", "/abort_requests", {"request_ids": ["a"]}),
        ("post", "/abort_requests", "/abort_requests", {}),
        ("get", "/load", "/load", None),
        ("post", "/generate", "/generate", {"text": "p", "return_logprob": True, "top_logprobs_num": 1}),
        ("post", "/generate", "/generate", {"text": ["p", "q"]}),
        ("post", "/generate", "/generate", {}),
        ("post", "/generate", "/generate", {"inputs": "p", "parameters": {"details": True, "top_n_tokens": 1}}),
        ("post", "/generate", "/generate", {"inputs": "p", "parameters": {"watermark": True}}),
        ("post", "/", "/", {"inputs": "p"}),
        ("post", "/", "/", {}),
        ("post", "/generate_stream", "/generate_stream", {}),
        ("post", "/api/chat", "/api/chat", {"model": "fake", "messages": MESSAGES, "stream": False, "logprobs": True}),
        ("post", "/api/chat", "/api/chat", {"model": "missing", "messages": MESSAGES}),
        ("post", "/api/generate", "/api/generate", {"model": "fake", "prompt": "p", "stream": False}),
        ("post", "/api/generate", "/api/generate", {"model": "fake"}),
        ("post", "/api/embed", "/api/embed", {"model": "fake", "input": ["a", "b"]}),
        ("post", "/api/embeddings", "/api/embeddings", {"model": "fake", "prompt": "a"}),
        ("post", "/api/show", "/api/show", {"model": "fake"}),
        ("post", "/api/pull", "/api/pull", {"model": "no/such/name"}),
        ("get", "/api/tags", "/api/tags", None),
        ("get", "/api/ps", "/api/ps", None),
        ("get", "/api/version", "/api/version", None),
        ("get", "/model_info", "/model_info", None),
        ("get", "/server_info", "/server_info", None),
        ("post", TEXT, TEXT, {}),
        ("post", TEXT, TEXT, {"prompt": "p", "model": "missing"}),
    ]:
        response = await client.request(method, path, json=body)
        check(document, route, method, response.status_code, "application/json", response.json())
    await fake.set_serving(False)
    for route in ("/health", "/readyz"):
        response = await client.get(route)
        check(document, route, "get", 503, "application/json", response.json())
    fake.error = RpcError(grpc.StatusCode.INTERNAL, "broken")
    response = await client.post(TEXT, json=TEXT_BODY)
    check(document, TEXT, "post", 500, "application/json", response.json())


def test_an_endpoint_with_a_parameter_that_nothing_fills_is_refused() -> None:
    async def endpoint(request: object, verbose: bool) -> Version:
        return Version(version="1")

    with pytest.raises(TypeError, match="verbose"):
        JsonRoute("/version", endpoint)
