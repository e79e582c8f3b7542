"""A gateway before the lines of a stack: requests go to their models, and wait while these are loaded."""

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest

from pagewire.gateway.models import comments
from pagewire.gateway.models import line as line_module
from pagewire.v1.common_pb2 import MODEL_KIND_UNSPECIFIED
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import eventually, running_gateway
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.gateway.models.fake_stack import ABSENT, ASLEEP, LOADING, READY, FakeStack


def chat(model: str | None, **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 9} | named | more


TEXT = expected_text("<user>hi<assistant>", 3, 9)


async def post(client: httpx.AsyncClient, body: dict[str, Any], **options: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body, **options)


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    return {one["id"]: one["state"] for one in (await client.get("/v1/models")).json()["data"]}


async def test_a_request_loads_its_model_and_no_other(two: httpx.AsyncClient, stack: FakeStack) -> None:
    assert await states(two) == {"a": "absent", "gpt": "absent", "b": "absent"}
    answers = await asyncio.gather(*(post(two, chat("b")) for _ in range(3)))
    for answer in answers:
        body = answer.json()
        assert (body["choices"][0]["message"]["content"], body["model"]) == (TEXT, "b")
    assert [one.name for one in stack.requests] == ["b"], "once for all that wait"
    assert await states(two) == {"a": "absent", "gpt": "absent", "b": "ready"}
    assert not stack.services["a"].received


async def test_names_without_a_model_of_their_own(two: httpx.AsyncClient, stack: FakeStack) -> None:
    service = stack.services["a"]
    for given, reported in ((None, "a"), ("gpt", "gpt"), ("a", "a")):
        assert (await post(two, chat(given))).json()["model"] == reported
        assert service.received[-1].model == ("" if given is None else "a")
    unknown = await post(two, chat("nobody"))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "served here: a, gpt, b" in unknown.json()["error"]["message"]
    stack.default_line = "a"
    stack.tell()
    async with asyncio.timeout(10):
        while (answer := await post(two, chat("gpt-4o-mini"))).status_code == 404:
            pass
    assert answer.json()["model"] == "gpt-4o-mini" and service.received[-1].model == "a"
    assert stack.services["b"].received == []


async def test_adapters_are_found_at_their_model(two: httpx.AsyncClient, stack: FakeStack) -> None:
    for name in ("a", "b"):
        await stack.load(name)
    loaded = await two.put("/v1/admin/adapters/lora", json={"path": "/lora", "model": "b"})
    assert loaded.status_code == 200, loaded.text
    for given, upstream in (("lora", "lora"), ("b:lora", "b:lora")):
        assert (await post(two, chat(given))).status_code == 200
        assert stack.services["b"].received[-1].model == upstream
    assert (await two.get("/v1/models/lora")).json()["parent"] == "b"
    assert (await two.delete("/v1/admin/adapters/lora")).status_code == 204
    assert not stack.services["b"].adapters


async def test_an_adapter_that_cannot_be_read_says_why(
    client: httpx.AsyncClient, fake: FakeTokenizer, two: httpx.AsyncClient, stack: FakeStack
) -> None:
    await stack.load("b")
    for http, service in ((client, fake), (two, stack.services["b"])):
        service.broken_adapters["torn"] = "its weights are cut off"
        if http is two:
            assert (await post(two, chat("b"))).status_code == 200
        for answer in (await http.get("/v1/models/torn"), await post(http, chat("torn"))):
            assert answer.status_code == 404, answer.text
            assert answer.json()["error"]["message"] == "the adapter 'torn' cannot be served: its weights are cut off"


async def test_calls_wait_as_generations_do(two: httpx.AsyncClient, stack: FakeStack) -> None:
    stack.may_load.clear()
    calls = {
        "/v1/embeddings": {"model": "b", "input": "four"},
        "/v1/rerank": {"model": "b", "query": "q", "documents": ["d"]},
        "/tokenize": {"model": "b", "prompt": "p"},
        "/v1/messages/count_tokens": {"model": "b", "messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"model": "b", "prompt": "p", "max_tokens": 3, "n": 1, "best_of": 2},
    }
    waiting_calls = [asyncio.create_task(two.post(path, json=body)) for path, body in calls.items()]
    await eventually(lambda: stack.requests)
    assert (await post(two, chat("a", max_tokens=1), headers={"x-request-timeout": "0.05"})).status_code == 504
    stack.may_load.set()
    for answer in await asyncio.gather(*waiting_calls):
        assert answer.status_code == 200, answer.text
    assert [one.name for one in stack.requests].count("b") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", chat("b")), ("/v1/embeddings", {"model": "b", "input": "i"}),
     ("/tokenize", {"model": "b", "prompt": "p"})],
)  # fmt: skip
async def test_a_wait_ends_at_the_deadline(
    two: httpx.AsyncClient, stack: FakeStack, path: str, body: dict[str, Any]
) -> None:
    stack.may_load.clear()
    late = await two.post(path, json=body, headers={"x-request-timeout": "0.05"})
    assert late.status_code == 504 and "timed out: loading b took too long" in late.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", chat("b")), ("/v1/embeddings", {"model": "b", "input": "i"}),
     ("/tokenize", {"model": "b", "prompt": "p"})],
)  # fmt: skip
async def test_a_client_that_leaves_waits_no_longer(
    two: httpx.AsyncClient, stack: FakeStack, path: str, body: dict[str, Any]
) -> None:
    stack.may_load.clear()
    asking = asyncio.create_task(two.post(path, json=body))
    await eventually(lambda: stack.requests)

    async def in_flight() -> bool:
        exposition = (await two.get("/metrics")).text
        return "pagewire:http_requests_in_flight{" in exposition and not any(
            line.startswith("pagewire:http_requests_in_flight") and line.endswith(" 0.0")
            for line in exposition.splitlines()
        )

    assert await in_flight()
    asking.cancel()
    async with asyncio.timeout(10):
        while await in_flight():
            pass
    stack.may_load.set()
    await eventually(lambda: stack.lines["b"].state == READY)
    assert not stack.services["b"].received and not stack.services["b"].tokenized


async def test_a_model_that_cannot_be_loaded_fails_its_own_requests(two: httpx.AsyncClient, stack: FakeStack) -> None:
    stack.problems["b"] = "b: the file is cut off"
    stack.may_load.clear()
    asking = [
        asyncio.create_task(two.post(path, json=body))
        for path, body in (
            ("/v1/chat/completions", chat("b")),
            ("/v1/chat/completions", chat("b", stream=True)),
            ("/v1/embeddings", {"model": "b", "input": "i"}),
        )
    ]
    other = asyncio.create_task(post(two, chat("a")))
    await eventually(lambda: len(stack.requests) == 2)
    stack.may_load.set()
    for answer in await asyncio.gather(*asking):
        assert answer.status_code == 503 and "the file is cut off" in answer.json()["error"]["message"]
        assert 90 < int(answer.headers["retry-after"]) <= 101
    assert (await other).status_code == 200
    assert (await post(two, chat("b"))).status_code == 503 and len(stack.requests) == 2, "not before its time"
    [broken] = [one for one in (await two.get("/v1/models")).json()["data"] if one["id"] == "b"]
    assert (broken["state"], broken["problem"]) == ("absent", "b: the file is cut off")
    # The next request after that time tries again.
    del stack.problems["b"]
    stack.lines["b"].retry_time.seconds = 1
    stack.tell()
    async with asyncio.timeout(10):
        while (await post(two, chat("b"))).status_code != 200:
            pass


async def test_what_never_fits_is_refused_with_the_reason(two: httpx.AsyncClient, stack: FakeStack) -> None:
    stack.refusal = RpcError(grpc.StatusCode.FAILED_PRECONDITION, "b needs 5.1 GiB of 4 GiB")
    for body in (chat("b"), chat("b", stream=True)):
        refused = await post(two, body)
        assert refused.status_code == 503 and refused.json()["error"]["message"] == "b needs 5.1 GiB of 4 GiB"


async def test_streams_that_wait_have_comments(
    two: httpx.AsyncClient, stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comments, "COMMENT_S", 0.01)
    stack.may_load.clear()
    for body in (chat("b", stream=True), chat("gpt", stream=True)):
        async with two.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(2):
                name = {"b": "b", "gpt": "a"}[body["model"]]
                assert [await anext(lines), await anext(lines)] == [f": loading {name}", ""]
            if body["model"] == "gpt":
                stack.problems["a"] = "it is broken"
            stack.may_load.set()
            events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
        stack.may_load.clear()
        if body["model"] == "b":
            chunks = [json.loads(event) for event in events[:-1]]
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            assert "".join(delta.get("content", "") for delta in deltas) == TEXT
        else:
            assert json.loads(events[0])["error"]["message"] == "it is broken"


async def test_a_stream_outlives_its_line(two: httpx.AsyncClient, stack: FakeStack) -> None:
    """All processes of a line end in the middle of a stream; the stream asks for them, and goes on."""
    service = stack.services["b"]
    service.steps_left = 3
    asking = asyncio.create_task(post(two, chat("b")))
    await eventually(lambda: service.steps_left == 0)
    await stack.end("b")
    service.steps_left = None
    assert (await asking).json()["choices"][0]["message"]["content"] == TEXT
    assert [one.name for one in stack.requests] == ["b", "b"]


async def test_the_last_lines_count_while_the_stack_is_away(two: httpx.AsyncClient, stack: FakeStack) -> None:
    await stack.load("a")
    assert (await post(two, chat("a"))).status_code == 200
    await stack.stop()
    assert (await post(two, chat("a"))).status_code == 200
    waiting_one = asyncio.create_task(post(two, chat("b")))
    assert (await states(two))["b"] == "absent"
    await stack.start()
    assert (await waiting_one).status_code == 200


async def test_a_gateway_waits_for_its_stack(stack: FakeStack) -> None:
    await stack.stop()
    async with running_gateway(stack.address, lines_address=stack.address) as client:
        asking = asyncio.create_task(post(client, chat("b")))
        assert (await client.get("/readyz")).status_code == 503
        await stack.start()
        assert (await asking).status_code == 200


async def test_readiness_is_that_of_the_default_model(two: httpx.AsyncClient, stack: FakeStack) -> None:
    async def ready() -> tuple[int, str]:
        answer = await two.get("/readyz")
        return answer.status_code, answer.json().get("reason", "")

    async def until(status: int, reason: str) -> None:
        async with asyncio.timeout(10):
            while await ready() != (status, reason):
                pass

    await until(200, "a is absent, b is absent")
    line = stack.lines["a"]
    line.pinned = True
    line.state, line.progress = LOADING, "reads weights"
    stack.tell()
    await until(503, "a is loading: it reads weights")
    line.state, line.problem = ABSENT, "no such file"
    stack.tell()
    await until(503, "a could not be loaded: no such file")
    line.pinned = False  # only a request would load it
    stack.tell()
    await until(200, "a is absent, b is absent")
    await stack.load("a")
    await until(200, "b is absent")
    await stack.load("b")
    await until(200, "")


async def test_models_are_put_and_deleted(two: httpx.AsyncClient, stack: FakeStack) -> None:
    url = "/v1/admin/models/new/one"
    created = await two.put(url, json={"model": "tiny", "aliases": ["n"], "flags": {"max-model-len": 64}})
    assert (created.status_code, created.json()["id"], created.json()["state"]) == (201, "new/one", "absent")
    assert created.json()["size"] == 7 and created.json()["capabilities"] == []
    assert (await two.put(url, json={"model": "tiny"})).status_code == 200
    assert (await post(two, chat("n"))).json()["model"] == "n"
    for body, status, words in (
        ({"model": "wrong"}, 400, "there is no model 'wrong'"),
        ({"model": "other"}, 409, "delete it first"),
        ({"model": "m", "name": "x"}, 400, "the path names the model"),
        ({"model": "m", "pined": True}, 400, "did you mean 'pinned'?"),
        ({}, 400, "model: field required"),
    ):
        refused = await two.put(url, json=body)
        assert refused.status_code == status and words in refused.json()["error"]["message"], refused.text
    assert (await two.delete(url)).status_code == 204
    assert (await two.delete(url)).status_code == 404
    assert (await post(two, chat("new/one"))).status_code == 404


async def test_a_deleted_model_ends_what_waits_for_it(two: httpx.AsyncClient, stack: FakeStack) -> None:
    stack.may_load.clear()
    asking = asyncio.create_task(post(two, chat("b")))
    await eventually(lambda: stack.requests)
    assert (await two.delete("/v1/admin/models/b")).status_code == 204
    ended = await asking
    assert ended.status_code == 404 and "'b' was deleted" in ended.json()["error"]["message"]


async def test_requests_ask_again_after_an_operator_took_their_wish_back(
    two: httpx.AsyncClient, stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "WISH_S", 0.01)
    stack.forgets = True
    asking = asyncio.create_task(post(two, chat("b")))
    await eventually(lambda: stack.requests)
    stack.forgets = False
    assert (await asking).status_code == 200


async def test_load_and_aborts_do_not_wait_for_a_model_that_is_being_loaded(
    two: httpx.AsyncClient, stack: FakeStack
) -> None:
    await stack.load("b")
    assert (await post(two, chat("b"))).status_code == 200
    stack.lines["b"].state = LOADING  # its tokenizer service runs already
    stack.tell()
    async with asyncio.timeout(10):
        while (await states(two))["b"] != "loading":
            pass
        assert (await two.get("/load")).json() == {"server_load": 0}
        assert (await two.post("/abort_request", json={"rid": "x"})).json()["aborted"] == 2


async def test_a_request_asks_again_for_a_model_after_its_wish_was_taken_back(
    two: httpx.AsyncClient, stack: FakeStack
) -> None:
    stack.forgets = True
    asking = asyncio.create_task(post(two, chat("b")))
    await eventually(lambda: stack.requests)
    stack.forgets = False
    stack.lines["b"].num_withdrawals += 1
    stack.tell()
    assert (await asking).status_code == 200 and len(stack.requests) == 2


async def test_unknown_names_never_put_the_model_to_sleep_that_serves_them(
    two: httpx.AsyncClient, stack: FakeStack
) -> None:
    stack.default_line, stack.services["a"].kind = "a", MODEL_KIND_UNSPECIFIED
    await stack.load("a")
    assert (await post(two, chat("unknown"))).status_code == 200
    for method, path in (
        ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("POST", "/reset_prefix_cache"),
    ):  # fmt: skip
        refused = await two.request(method, path, params={"model": "unknown"})
        assert refused.status_code == 404 and "'unknown' does not exist" in refused.text
    unload = {"model": "unknown", "keep_alive": 0}
    assert (await two.post("/api/generate", json=unload)).status_code == 404
    turns = {"messages": [{"role": "user", "content": "hi"}], "stream": False}
    answered = await two.post("/api/chat", json=unload | turns)
    assert answered.status_code == 200
    assert not stack.rests and not stack.services["a"].sleeps


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", {}), ("/v1/embeddings", {"input": "i"})])
async def test_what_waits_for_a_model_ends_at_once_when_the_stack_ends(
    stack: FakeStack, path: str, body: dict[str, object]
) -> None:
    stack.may_load.clear()
    leave = asyncio.Event()
    async with running_gateway(stack.address, leave, lines_address=stack.address, shutdown_timeout=600) as client:
        asking = asyncio.create_task(client.post(path, json=(body or chat("b")) | {"model": "b"}))
        await eventually(lambda: stack.requests)
        await stack.stop()
        leave.set()
        ended = await asking
        assert ended.status_code == 503 and "shutting down" in ended.json()["error"]["message"]


async def test_operators_wake_and_put_to_sleep_by_name(two: httpx.AsyncClient, stack: FakeStack) -> None:
    sleep, wake = "/v1/admin/models/b/sleep", "/v1/admin/models/b/wake"
    refused = await two.post(sleep)
    assert refused.status_code == 409 and "b is absent" in refused.json()["error"]["message"]
    assert (await two.get("/is_sleeping?model=b")).json() == {"is_sleeping": True}
    assert (await two.post(wake)).json() == {
        "object": "model.state", "model": "b", "state": "ready", "level": 0, "executors": 2,
    }  # fmt: skip
    assert [one.name for one in stack.requests] == ["b"]
    assert (await two.get("/is_sleeping?model=b")).json() == {"is_sleeping": False}
    assert (await two.post(sleep)).json()["state"] == "asleep" and len(stack.services["b"].sleeps) == 1
    # The stack sees that; then requests wait until an operator wakes the model.
    stack.lines["b"].state, stack.lines["b"].sleeps_until_woken = ASLEEP, True
    stack.tell()
    async with asyncio.timeout(10):
        while (await states(two))["b"] != "asleep":
            pass
    assert (await post(two, chat("a"))).status_code == 200
    asking = asyncio.create_task(two.post("/v1/embeddings", json={"model": "b", "input": "i"}))
    assert (await two.post("/tokenize", json={"model": "b", "prompt": "p"})).status_code == 200
    assert [one.name for one in stack.requests] == ["b", "a"] and not asking.done()
    stack.lines["b"].sleeps_until_woken = False
    assert (await two.post("/wake_up?model=b")).status_code == 200
    assert (await asking).status_code == 200


async def test_all_models_are_reported(two: httpx.AsyncClient, stack: FakeStack) -> None:
    stack.lines["b"].memory_bytes, stack.lines["b"].memory_measured = 1 << 20, True
    assert (await post(two, chat("b"))).status_code == 200
    assert await states(two) == {"a": "absent", "gpt": "absent", "b": "ready"}
    status = (await two.get("/v1/status")).json()
    assert [(one["model"], one["state"], one["loads"]) for one in status["models"]] == [
        ("a", "absent", 0),
        ("b", "ready", 1),
    ]
    assert status["memory_bytes"] == 4 << 30
    assert {one["model"] for one in status["services"] if one["service"] == "tokenizer"} == {"b"}
    metrics = (await two.get("/metrics")).text
    assert 'pagewire:line_state{model_name="b",service="stack",state="ready"} 1.0' in metrics
    assert 'pagewire:line_loads_total{model_name="b",service="stack"} 1.0' in metrics
    assert 'pagewire:shared_total{kind="a\\"b",model_name="b",service="tokenizer"} 2.0' in metrics


async def test_a_gateway_without_a_stack_says_where_its_models_come_from(client: httpx.AsyncClient) -> None:
    for answer in (
        await client.put("/v1/admin/models/m", json={"model": "tiny"}),
        await client.delete("/v1/admin/models/fake"),
    ):
        assert answer.status_code == 409 and "--tokenizer-discovery" in answer.json()["error"]["message"]
