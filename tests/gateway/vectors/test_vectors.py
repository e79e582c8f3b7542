"""Embeddings, scores and classes over REST: bodies, large batches, and clients and services that go away."""

import asyncio
import base64
import json
import logging
import struct
from typing import Any

import grpc
import httpx
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.field_names import rename
from pagewire.gateway.vectors import answer, calls, translate
from pagewire.gateway.vectors.bodies.cohere import CohereEmbedRequest
from pagewire.gateway.vectors.bodies.requests import EmbeddingRequest, RerankRequest, ScoreRequest
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import access_lines, eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

EMBEDDINGS = "/v1/embeddings"
COHERE = "/v2/embed"


async def test_every_form_of_input(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for given, lengths in (("abc", [3]), (["a", "bc"], [1, 2]), ([7, 8], [2]), ([[7], [8, 9]], [1, 2])):
        response = await client.post(EMBEDDINGS, json={"input": given}, headers={"X-Request-Id": "mine"})
        assert response.json() | {"created": 0} == {
            "id": "embd-mine",
            "object": "list",
            "created": 0,
            "model": "fake",
            "data": [
                {"object": "embedding", "index": index, "embedding": [length, 0.5]}
                for index, length in enumerate(lengths)
            ],
            "usage": {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)},
        }
    assert [call.request_id for call in fake.vector_calls] == ["mine"] * 4
    chat = [{"role": "user", "content": "a"}]
    for extra, length in (({}, len("<user>a")), ({"add_generation_prompt": True}, len("<user>a<assistant>"))):
        answer = (await client.post(EMBEDDINGS, json={"messages": chat, **extra})).json()
        assert answer["usage"]["prompt_tokens"] == length


async def test_the_official_client_gets_numbers(ai: openai.AsyncOpenAI) -> None:
    """The client requests base64 by default."""
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = await ai.embeddings.create(model="fake", input=["ab", "c"], user="me", **options)
        vectors_ = [one.embedding for one in answer.data]
        if isinstance(vectors_[0], str):
            vectors_ = [list(struct.unpack("<2f", base64.b64decode(vector))) for vector in vectors_]
        assert vectors_ == [[2, 0.5], [1, 0.5]]
        assert (answer.usage.prompt_tokens, answer.model) == (3, "fake")
    assert len((await ai.embeddings.create(model="fake", input="ab", dimensions=1)).data[0].embedding) == 1
    with pytest.raises(openai.NotFoundError, match="missing"):
        await ai.embeddings.create(model="missing", input="a")


async def test_what_is_asked_for_goes_to_the_tokenizer(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    options = {"truncate_prompt_tokens": -1, "add_special_tokens": False, "cache_salt": "secret"}
    options["truncation_side"] = "left"
    await client.post(EMBEDDINGS, json={"input": "a", "prompt_name": "query", "dimensions": 1, **options})
    pairs = {"query": "q", "documents": ["a"], "max_tokens_per_query": 4, "max_tokens_per_doc": 5}
    await client.post("/rerank", json={**pairs, **options})
    embed, score = fake.vector_calls
    del options["truncation_side"]
    wanted = inference_pb2.InputOptions(**options, truncate_start=True)
    assert (embed.prompt_name, embed.dimensions, embed.options) == ("query", 1, wanted)
    assert (score.max_tokens_per_query, score.max_tokens_per_doc, score.options) == (4, 5, wanted)


async def test_cohere_bodies_name_types_and_uses(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """Both signs of the fake's [length, 0.5] are positive: 11 and six zeros that fill the byte."""
    body = {"model": "fake", "texts": ["abc", "a"], "input_type": "search_query"}
    types = ["float", "base64", "binary", "ubinary"]
    answer = (await client.post(COHERE, json=body | {"embedding_types": types}, headers={"X-Request-Id": "a"})).json()
    packed = [base64.b64encode(struct.pack("<2f", length, 0.5)).decode() for length in (3, 1)]
    assert answer == {
        "response_type": "embeddings_by_type",
        "id": "embd-a",
        "embeddings": {
            "float": [[3, 0.5], [1, 0.5]],
            "binary": [[192 - 128]] * 2,
            "ubinary": [[192]] * 2,
            "base64": packed,
        },
        "texts": ["abc", "a"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 4}},
    }
    assert list(fake.vector_calls[0].preferred_prompt_names) == ["search_query", "query"]
    plain = (await client.post(COHERE, json=body | {"output_dimension": 1})).json()
    assert plain["embeddings"] == {"float": [[3], [1]]}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"truncate_prompt_tokens": -1}),
        ({"truncate": "END", "max_tokens": 3}, {"truncate_prompt_tokens": 3}),
        ({"truncate": "START"}, {"truncate_prompt_tokens": -1, "truncate_start": True}),
        ({"truncate": "NONE"}, {}),
        ({"max_tokens": 10**6}, {"truncate_prompt_tokens": 1000}),
    ],
)
async def test_cohere_bodies_say_what_is_cut(
    client: httpx.AsyncClient, fake: FakeTokenizer, given: dict[str, Any], options: dict[str, Any]
) -> None:
    assert (await client.post(COHERE, json={"texts": ["a"], **given})).status_code == 200
    assert fake.vector_calls[0].options == inference_pb2.InputOptions(**options)


async def test_pooling_is_what_the_model_is_served_for(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    answer = (await client.post("/pooling", json={"input": ["abc"]})).json()
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": [3, 0.5]}]
    fake.kind = common_pb2.MODEL_KIND_CLASSIFY
    answer = (await client.post("/v1/pooling", json={"input": ["abc"], "encoding_format": "base64"})).json()
    assert struct.unpack("<2f", base64.b64decode(answer["data"][0]["data"])) == (0.25, 0.75)
    refused = await client.post("/pooling", json={"input": "a", "dimensions": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


async def test_classes(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/classify", json={"input": ["a", "bc"]})).json()
    assert answer["data"] == [
        {"index": 0, "label": "odd", "probs": [0.25, 0.75], "num_classes": 2},
        {"index": 1, "label": "even", "probs": [1, 0], "num_classes": 2},
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


@pytest.mark.parametrize(
    ("body", "scores"),
    [
        ({"text_1": "ab", "text_2": ["b", {"text": "bc"}, "c"]}, [1, 0.5, 0]),
        ({"queries": ["a", "b"], "documents": ["a", "a"]}, [1, 0]),
        ({"queries": ["ab"], "items": ["a", "c"]}, [1, 0]),
        ({"data_1": {"text": "a"}, "data_2": "a"}, [1]),
    ],
)
async def test_scores(client: httpx.AsyncClient, body: dict[str, Any], scores: list[float]) -> None:
    answer = (await client.post("/v1/score", json=body)).json()
    assert answer["data"] == [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]


async def test_ranking(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "query": "ab", "documents": ["c", {"text": "ac"}, "b", "a"]}
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = (await client.post(route, json=body, headers={"X-Request-Id": "mine"})).json()
        assert (answer["id"], answer["model"]) == ("rerank-mine", "fake")
        assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
            (2, 1),
            (3, 1),
            (1, 0.5),
            (0, 0),
        ]
        assert answer["results"][2]["document"] == {"text": "ac"}
    best = (await client.post("/rerank", json={**body, "top_n": 1, "return_documents": False})).json()
    assert best["results"] == [{"index": 2, "relevance_score": 1}]
    assert len((await client.post("/rerank", json={**body, "top_n": 9})).json()["results"]) == 4


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": [1, "a"]}, "input[1]"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        (EMBEDDINGS, {"input": "a", "temperature": 1}, "temperature"),
        (COHERE, {"input_type": "search_query"}, "texts"),
        (COHERE, {"texts": ["a"], "images": ["data:,"]}, "images"),
        (COHERE, {"texts": ["a"], "embedding_types": ["float", "int8"]}, "embedding_types[1]"),
        (COHERE, {"texts": ["a"], "input_type": "image"}, "input_type"),
        (COHERE, {"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "max_tokens"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "documents": ["a"]}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents[0].image"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields"),
    ],
)
async def test_refused_by_name(client: httpx.AsyncClient, route: str, body: dict[str, Any], param: str) -> None:
    response = await client.post(route, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_values_that_ask_for_nothing_are_taken(client: httpx.AsyncClient) -> None:
    defaults = {"embed_dtype": "float32", "endianness": "native", "use_activation": True, "priority": 0, "user": None}
    assert (await client.post(EMBEDDINGS, json={"input": "a", **defaults})).status_code == 200


async def test_a_large_batch_goes_in_parts(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """The first alone, so that a batch is refused before any of it is computed, or not at all."""
    texts = ["a" * (index % 7 + 1) for index in range(1500)]
    fake.running.clear()
    call = asyncio.create_task(client.post(EMBEDDINGS, json={"input": texts}))
    await eventually(lambda: len(fake.vector_calls) == 1)
    fake.running.set()
    answer = (await call).json()
    assert [one["index"] for one in answer["data"]] == list(range(1500))
    assert [one["embedding"][0] for one in answer["data"]] == [len(text) for text in texts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    sizes = {call.options.first_index: len(call.inputs) for call in fake.vector_calls}
    assert sizes == {0: 256, 256: 256, 512: 256, 768: 256, 1024: 256, 1280: 220}


async def test_parts_fit_into_messages(
    client: httpx.AsyncClient, fake: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "PART_BYTES", 1000)
    body = {"query": "q" * 600, "documents": ["d" * 300, "e", "f" * 2000, "q"]}
    answer = (await client.post("/rerank", json=body)).json()
    assert [one["index"] for one in answer["results"]] == [3, 0, 1, 2]
    assert [len(call.pairs) for call in fake.vector_calls] == [1, 1, 1, 1]


async def test_more_than_an_answer_may_hold(
    client: httpx.AsyncClient, fake: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "MAX_ANSWER_BYTES", 100_000)
    response = await client.post(EMBEDDINGS, json={"input": ["a"] * 5000})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
    assert "send fewer" in response.json()["error"]["message"]
    assert len(fake.vector_calls) == 1, "before more is computed"
    monkeypatch.setattr(translate, "MAX_INPUTS", 10)
    response = await client.post(EMBEDDINGS, json={"input": ["a"] * 11})
    assert response.json()["error"]["message"] == "input has 11 entries; at most 10 are possible"
    monkeypatch.setattr(translate, "MAX_PAIR_CHARACTERS", 10)
    response = await client.post("/rerank", json={"query": "abc", "documents": ["a"] * 4})
    assert "the pairs have 16 characters; 10 are possible" in response.json()["error"]["message"]


async def test_errors_of_the_tokenizer(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for code, status in ((grpc.StatusCode.INVALID_ARGUMENT, 400), (grpc.StatusCode.RESOURCE_EXHAUSTED, 429)):
        fake.error = RpcError(code, "the cause")
        response = await client.post(EMBEDDINGS, json={"input": "a"})
        assert (response.status_code, response.json()["error"]["message"]) == (status, "the cause")
    fake.error = RpcError(grpc.StatusCode.UNAVAILABLE, "no executor")
    response = await client.post(EMBEDDINGS, json={"input": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert len(fake.vector_calls) == 3, "what the service says itself is final"
    half = await client.post(EMBEDDINGS, content=b'{"input": "\\ud800"}', headers={"content-type": "application/json"})
    assert half.status_code == 400


async def test_a_client_that_goes_away_takes_its_calls_along(
    client: httpx.AsyncClient, fake: FakeTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    fake.running.clear()
    with caplog.at_level(logging.INFO, "pagewire.gateway"):
        call = asyncio.create_task(client.post(EMBEDDINGS, json={"input": ["a"] * 3}))
        await eventually(lambda: fake.vector_calls)
        call.cancel()
        await eventually(lambda: fake.num_cancelled == 1)
        await eventually(lambda: access_lines(caplog))
    assert access_lines(caplog)[0].getMessage().startswith("POST /v1/embeddings 499 ")


async def test_a_tokenizer_that_dies_is_asked_again(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address) as client:
        await wait_ready(client)
        fake.running.clear()
        calls = [asyncio.create_task(client.post(EMBEDDINGS, json={"input": ["a", "bc"]}))]
        await eventually(lambda: fake.vector_calls)
        await fake.stop()
        calls.append(asyncio.create_task(client.post(EMBEDDINGS, json={"input": ["a", "bc"]})))
        fake.running.set()
        await fake.start(address)
        for response in await asyncio.gather(*calls):
            assert [one["embedding"] for one in response.json()["data"]] == [[1, 0.5], [2, 0.5]]
    assert len(fake.vector_calls) == 3


async def test_a_tokenizer_that_stays_away_ends_calls(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, recovery_timeout=0.3) as client:
        await wait_ready(client)
        fake.running.clear()
        call = asyncio.create_task(client.post(EMBEDDINGS, json={"input": "a"}))
        await eventually(lambda: fake.vector_calls)
        await fake.stop()
        response = await call
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the tokenizer service cannot be reached; try again"


async def test_what_operators_see(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, exporter: InMemorySpanExporter
) -> None:
    with caplog.at_level(logging.INFO, "pagewire.gateway"):
        await client.post(EMBEDDINGS, json={"input": "abc", "request_id": "mine"})
        await client.post(EMBEDDINGS, json={"input": "abc", "model": "missing"})
        await eventually(lambda: len(access_lines(caplog)) == 2)
    done, refused = (line.getMessage() for line in access_lines(caplog))
    assert done.startswith("POST /v1/embeddings 200 ") and done.endswith(" prompt=3")
    assert refused.endswith(" prompt=0: the model 'missing' does not exist; served here: fake, alias")
    assert access_lines(caplog)[0].request_id == "mine"
    exposition = (await client.get("/metrics")).text
    assert 'pagewire:gateway_e2e_request_latency_seconds_count{model_name="fake",operation="embeddings"' in exposition
    assert 'route="/v1/embeddings"' in exposition
    span, failed = exporter.get_finished_spans()
    assert span.name == "POST /v1/embeddings" and span.status.is_ok and failed.status.is_ok
    attributes = json.loads(span.to_json())["attributes"]
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.usage.input_tokens"]) == ("embeddings", 3)


async def test_other_names_of_truncation(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for truncate, side, most, cuts_start in (
        (True, None, -1, False),
        (True, "left", -1, True),
        ("END", None, -1, False),
        ("START", None, -1, True),
        (False, None, None, False),
        ("NONE", None, None, False),
    ):
        body = {"input": "abc", "truncate": truncate, "truncation_side": side}
        assert (await client.post(EMBEDDINGS, json=body)).status_code == 200
        options = fake.vector_calls[-1].options
        found = options.truncate_prompt_tokens if options.HasField("truncate_prompt_tokens") else None
        assert (found, options.truncate_start) == (most, cuts_start)
    both = {"input": "abc", "truncate": True, "truncate_prompt_tokens": 5}
    assert (await client.post(EMBEDDINGS, json=both)).json()["error"]["param"] == "truncate"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (EmbeddingRequest(input=[5]), "input"),
        (EmbeddingRequest(messages=[{"role": "user", "content": "a"}]), "messages"),
        (RerankRequest(query="a", documents=["b"]), "documents"),
        (ScoreRequest(text_1="a", text_2="b"), "text_2"),
        (CohereEmbedRequest(texts=["a"]), "texts"),
    ],
)
def test_a_fault_that_the_scheduler_finds_has_the_clients_name(body: Any, name: str) -> None:
    found = ("prompt_token_ids", "prompt_token_ids contains 5; the vocabulary is 0 to 4")
    error = rename(ApiError(400, "", violations=[found]), translate.names_of(body))
    assert (error.param, error.message) == (name, f"{name} contains 5; the vocabulary is 0 to 4")
