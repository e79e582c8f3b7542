"""Batches: every line is answered once, by whichever gateway is there, exactly as by HTTP."""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from pagewire.gateway.batches import bodies
from pagewire.v1 import common_pb2
from pagewire.wire.rpc import RpcError
from tests.gateway.batches.conftest import Official
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.core.test_openapi import check
from tests.gateway.fake_tokenizer import FakeTokenizer

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def chat(number: int, **parameters: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"question {number}"}], "seed": number, "max_tokens": 5}
    return {"custom_id": f"q{number}", "method": "POST", "url": CHAT, "body": body | parameters}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


async def start(ai: openai.AsyncOpenAI, lines: Sequence[Any], endpoint: str = CHAT, **more: Any) -> Any:
    file = await ai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    more = {"completion_window": "24h"} | more
    return await ai.batches.create(input_file_id=file.id, endpoint=endpoint, **more)


async def end(ai: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await ai.batches.retrieve(id)).status not in ENDED:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return batch


async def content(ai: openai.AsyncOpenAI, id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await ai.files.content(id)).content.splitlines()] if id else []


async def test_a_batch_answers_like_http(ai: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    wrong = [{"temperature": -1}, {"nonsense": 1}, {"temperature": float("nan")}, {"temperature": float("inf")}]
    lines = [chat(number) for number in range(20)] + [chat(20 + index, **one) for index, one in enumerate(wrong)]
    created = await start(ai, lines, metadata={"for": "me"})
    assert (created.object, created.status, created.endpoint) == ("batch", "validating", CHAT)
    assert created.expires_at == created.created_at + 24 * 3600
    batch = await end(ai, created.id)
    assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"for": "me"})
    assert batch.request_counts.to_dict() == {"total": 24, "completed": 20, "failed": 4}
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = {line["custom_id"]: line for line in await content(ai, batch.output_file_id)}
    assert answers.keys() == {f"q{number}" for number in range(20)}
    for line in lines[:20]:
        answer = answers[line["custom_id"]]
        direct = (await client.post(CHAT, json=line["body"])).json()
        body = answer["response"]["body"]
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        assert body["id"] == f"chatcmpl-{answer['response']['request_id']}"
        assert body | {"id": 0, "created": 0} == direct | {"id": 0, "created": 0}
    usage = [answer["response"]["body"]["usage"] for answer in answers.values()]
    assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in usage) == 100
    assert batch.usage.total_tokens == sum(one["total_tokens"] for one in usage)
    errors = {line["custom_id"]: line["response"] for line in await content(ai, batch.error_file_id)}
    assert {custom_id: (one["status_code"], one["body"]["error"]["param"]) for custom_id, one in errors.items()} == {
        "q20": (400, "temperature"),
        "q21": (400, "nonsense"),
        "q22": (400, "temperature"),
        "q23": (400, "temperature"),
    }
    file = await ai.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "p", "max_tokens": 3, "priority": 1}),
        ("/v1/responses", {"input": "p"}),
        ("/v1/messages", {"model": "fake", "messages": [{"role": "user", "content": "p"}], "max_tokens": 3}),
        ("/v1/embeddings", {"input": ["p", "q"]}),
        ("/v1/score", {"text_1": "p", "text_2": "q"}),
        ("/v1/rerank", {"query": "p", "documents": ["q"]}),
    ],
)
async def test_other_endpoints(ai: openai.AsyncOpenAI, endpoint: str, body: dict[str, Any]) -> None:
    lines = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": body} for i in range(3)]
    batch = await end(ai, (await start(ai, lines, endpoint)).id)
    assert batch.error_file_id is None and batch.usage.input_tokens > 0
    assert [line["response"]["status_code"] for line in await content(ai, batch.output_file_id)] == [200] * 3


async def test_what_is_wrong_with_a_file_is_said_line_by_line(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    lines = [
        chat(1, model="fake"),
        b"{nonsense\n",
        b"\n",
        b"[1]\n",
        chat(1),
        {"method": "POST", "url": CHAT, "body": {}},
        chat(2) | {"method": "GET"},
        chat(3) | {"url": "/v1/completions"},
        chat(4) | {"body": "text"},
        chat(5, stream=True),
        chat(6, background=True),
        b'{"custom_id": "\xff"}\n',
    ]
    batch = await end(ai, (await start(ai, lines)).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (4, "invalid_json_line", None),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "missing_required_parameter", "custom_id"),
        (7, "invalid_method", "method"),
        (8, "invalid_url", "url"),
        (9, "invalid_type", "body"),
        (10, "invalid_request", "body.stream"),
        (11, "invalid_request", "body.background"),
        (12, "invalid_json_line", None),
    ]
    assert fake.received == []
    empty = await end(ai, (await start(ai, [b"\n"])).id)
    assert [(error.line, error.code) for error in empty.errors.data] == [(None, "empty_file")]
    unknown = await end(ai, (await start(ai, [chat(1, model="fake"), chat(2, model="other")])).id)
    assert [(error.line, error.code) for error in unknown.errors.data] == [(2, "model_not_found")]
    assert "other" in unknown.errors.data[0].message and unknown.failed_at is not None


@pytest.mark.parametrize("model", ["x", "fake:x", "alias:x"])
async def test_a_batch_may_name_an_adapter(ai: Official, fake: FakeTokenizer, model: str) -> None:
    fake.adapters["x"] = common_pb2.Adapter(name="x", path="/x", digest="fedcba987654")
    batch = await end(ai, (await start(ai, [chat(1, model=model), chat(2, model=model)])).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    assert [request.model for request in fake.received] == [model, model]


async def test_what_is_wrong_with_a_batch_is_said(ai: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    file = await ai.files.create(file=jsonl([chat(1)]), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for change, status, param in [
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, 400, "output_expires_after.seconds"),
        ({"color": "red"}, 400, "color"),
    ]:
        answer = await client.post("/v1/batches", json=good | change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert (await ai.batches.list()).data == []
    with pytest.raises(openai.NotFoundError, match="batch_x"):
        await ai.batches.retrieve("batch_x")
    with pytest.raises(openai.NotFoundError, match="batch_x"):
        await ai.batches.cancel("batch_x")


async def test_batches_are_listed_the_newest_first(ai: openai.AsyncOpenAI) -> None:
    ids = [(await start(ai, [chat(1)])).id for _ in range(3)]
    assert [batch.id async for batch in ai.batches.list(limit=2)] == ids[::-1]
    for id in ids:
        await end(ai, id)
    with pytest.raises(openai.ConflictError, match="it is completed"):
        await ai.batches.cancel(ids[0])


async def test_a_batch_keeps_its_input(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    fake.running.clear()
    batch = await start(ai, [chat(1), chat(2)])
    await ai.files.delete(batch.input_file_id)
    fake.running.set()
    assert (await end(ai, batch.id)).request_counts.completed == 2


async def test_interactive_requests_come_first(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    batch = await end(ai, (await start(ai, [chat(1), chat(2, priority=-3)])).id)
    assert batch.request_counts.completed == 2
    assert sorted(request.sampling_params.priority for request in fake.received) == [-3, 0]
    assert all(submission.context.is_batch for submission in fake.submissions), "the scheduler has them wait"
    await ai.completions.create(model="fake", prompt="hi")
    assert not fake.submissions[-1].context.is_batch


async def test_a_cancelled_batch_keeps_what_it_has(
    ai: openai.AsyncOpenAI, fake: FakeTokenizer, address: str, official: Official
) -> None:
    lines = [chat(number, max_tokens=1) for number in range(4)] + [chat(number) for number in range(4, 100)]
    fake.steps_left = 8
    batch = await start(ai, lines)
    await eventually(lambda: len(fake.live) > 10)
    async with running_gateway(address) as http:  # anyone may cancel it
        cancelling = await official(http).batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled") and cancelling.cancelling_at is not None
    batch = await end(ai, batch.id)
    assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
    answers = await content(ai, batch.output_file_id)
    assert {"q0", "q1", "q2", "q3"} <= {line["custom_id"] for line in answers}
    assert batch.request_counts.completed == len(answers) < 100
    await eventually(lambda: not fake.live)
    assert fake.aborted


async def test_what_an_expired_batch_has_not_answered_is_an_error(
    ai: openai.AsyncOpenAI, fake: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bodies._UNIT_S, "m", 2)
    fake.step_s = 0.05
    lines = [chat(1, max_tokens=1), chat(2, max_tokens=500), chat(3, max_tokens=500)]
    batch = await end(ai, (await start(ai, lines, completion_window="1m")).id)
    assert batch.status == "expired" and batch.expired_at >= batch.expires_at
    assert [line["custom_id"] for line in await content(ai, batch.output_file_id)] == ["q1"]
    errors = await content(ai, batch.error_file_id)
    assert sorted(line["custom_id"] for line in errors) == ["q2", "q3"]
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert all(line["response"] is None for line in errors)


async def test_a_full_or_absent_engine_is_asked_again(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    fake.error = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests wait")
    batch = await start(ai, [chat(1), chat(2)])
    await eventually(lambda: len(fake.received) >= 2)
    fake.error = None
    batch = await end(ai, batch.id)
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}


async def test_another_gateway_goes_on_where_one_has_stopped(
    fake: FakeTokenizer, address: str, official: Official
) -> None:
    async with running_gateway(address, batch_concurrency=5) as http:
        await wait_ready(http)
        batch = await start(official(http), [chat(number) for number in range(30)])
        await eventually(lambda: len(fake.received) > 12)
        fake.running.clear()
        assert len(fake.live) <= 5
    fake.running.set()
    async with running_gateway(address) as http:
        await wait_ready(http)
        ai = official(http)
        batch = await end(ai, batch.id)
        answers = await content(ai, batch.output_file_id)
    assert Counter(line["custom_id"] for line in answers) == Counter(f"q{number}" for number in range(30))
    asked = Counter(request.request_id for request in fake.received)
    assert len(asked) == 30
    assert 0 < asked.total() - len(asked) <= 5, "only what was in flight is asked again"


async def test_a_gateway_that_was_too_slow_leaves_its_batch_to_another(
    fake: FakeTokenizer, address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, official: Official
) -> None:
    fake.step_s = 0.01
    async with running_gateway(address, batch_concurrency=3) as one, running_gateway(address, batch_concurrency=3):
        await wait_ready(one)
        ai = official(one)
        batch = await start(ai, [chat(number) for number in range(100)])
        await eventually(lambda: len(fake.received) > 10)
        with closing(sqlite3.connect(tmp_path / "data" / "pagewire.db")) as database, database:
            database.execute("UPDATE jobs SET owner = 'another', leased_until = 0")
        batch = await end(ai, batch.id)
        answers = await content(ai, batch.output_file_id)
    assert "is run by another process" in caplog.text
    assert Counter(line["custom_id"] for line in answers) == Counter(f"q{number}" for number in range(100))
    asked = Counter(request.request_id for request in fake.received)
    assert asked.total() - len(asked) <= 3


async def test_gateways_share_batches(fake: FakeTokenizer, address: str, tmp_path: Path, official: Official) -> None:
    async with running_gateway(address) as one, running_gateway(address, api_key="secret") as two:
        await wait_ready(one)
        await wait_ready(two)
        async with openai.AsyncOpenAI(base_url=f"{two.base_url}/v1", api_key="secret") as other:
            batches = [(await start(other, [chat(i, max_tokens=2) for i in range(40)])).id for _ in range(12)]
            for id in batches:
                batch = await end(official(one), id)
                answers = await content(other, batch.output_file_id)
                assert sorted(line["custom_id"] for line in answers) == sorted(f"q{i}" for i in range(40))
    assert list((tmp_path / "data" / "batches").iterdir()) == [], "nothing is left of what was at work"


async def test_what_is_documented_is_answered(
    ai: openai.AsyncOpenAI, client: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    done = await end(ai, (await start(ai, [chat(1), chat(2, temperature=-1)])).id)
    failed = await end(ai, (await start(ai, [b"\n"])).id)
    for method, route, path in [
        ("get", "/v1/batches", "/v1/batches?limit=1"),
        ("get", "/v1/batches", "/v1/batches?limit=x"),
        ("get", "/v1/batches/{batch_id}", f"/v1/batches/{done.id}"),
        ("get", "/v1/batches/{batch_id}", f"/v1/batches/{failed.id}"),
        ("post", "/v1/batches/{batch_id}/cancel", f"/v1/batches/{done.id}/cancel"),
        ("post", "/v1/batches", "/v1/batches"),
    ]:
        answer = await client.request(method, path)
        check(document, route, method, answer.status_code, "application/json", answer.json())


async def test_a_line_of_too_many_values_fails_the_batch(ai: openai.AsyncOpenAI) -> None:
    line = json.dumps(chat(0)).replace('"seed": 0', f'"stop": [{"[]," * 200_000}[]]').encode() + b"\n"
    batch = await end(ai, (await start(ai, [line])).id)
    assert batch.status == "failed"
    (error,) = batch.errors.data
    assert error.code == "body_too_complex" and "200003 lists; at most 100000" in error.message
