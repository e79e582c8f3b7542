"""Kept generations, background responses and batches follow their model by name."""

import asyncio
import json

import httpx
import pytest

from pagewire.gateway.responses import background
from tests.gateway.conftest import eventually, running_gateway
from tests.gateway.models.fake_stack import FakeStack
from tests.gateway.models.test_lines import TEXT, chat, post


async def test_a_kept_generation_stays_with_its_model(stack: FakeStack) -> None:
    service, key = stack.services["a"], {"idempotency-key": "k"}
    service.steps_left = 3
    async with running_gateway(stack.address, lines_address=stack.address) as client:
        asking = asyncio.create_task(post(client, chat(None), headers=key))
        await eventually(lambda: service.steps_left == 0)
        await asyncio.sleep(0.3)  # until an output is kept
        asking.cancel()
    # The next stack has another default model.
    stack.lines = dict(reversed(stack.lines.items()))
    service.steps_left = None
    async with running_gateway(stack.address, lines_address=stack.address) as client:
        assert (await post(client, chat(None))).json()["model"] == "b"
        again = (await post(client, chat(None), headers=key)).json()
    assert (again["model"], again["choices"][0]["message"]["content"]) == ("a", TEXT)


async def test_a_background_response_waits_for_its_model(
    two: httpx.AsyncClient, stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "COMMENT_S", 0.01)
    stack.may_load.clear()
    body = {"model": "b", "input": "hi", "background": True, "stream": True, "max_output_tokens": 9}
    async with two.stream("POST", "/v1/responses", json=body) as answer:
        lines, seen = answer.aiter_lines(), list[str]()
        while ": loading b" not in seen:
            seen.append(await anext(lines))
        assert any("response.queued" in line for line in seen)
        stack.may_load.set()
        rest = [line async for line in lines]
    last = json.loads(rest[-2].removeprefix("data: "))
    assert (last["type"], last["response"]["model"]) == ("response.incomplete", "b")
    assert stack.services["b"].received[0].model == "b" and not stack.services["a"].received


async def test_lines_of_a_batch_reach_their_models(two: httpx.AsyncClient, stack: FakeStack) -> None:
    models = ["a", "b", "gpt", "b"]
    content = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": chat(model)})
        for number, model in enumerate(models)
    )
    file = (await two.post("/v1/files", files={"file": ("b.jsonl", content)}, data={"purpose": "batch"})).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await two.post("/v1/batches", json=asked)).json()
    async with asyncio.timeout(20):
        while (batch := (await two.get(f"/v1/batches/{batch['id']}")).json())["status"] != "completed":
            pass
    assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    output = (await two.get(f"/v1/files/{batch['output_file_id']}/content")).text
    answers = sorted((json.loads(line) for line in output.splitlines()), key=lambda one: one["custom_id"])
    assert [one["response"]["body"]["model"] for one in answers] == models
    assert [len(stack.services[name].received) for name in ("a", "b")] == [2, 2]
