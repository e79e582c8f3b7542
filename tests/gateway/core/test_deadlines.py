"""Deadlines of requests, and the delays after which refused requests may be retried."""

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest

from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_refusal_says_when_to_come_back(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many", retry_delay=2.25)
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3", "whole seconds, not too few"
    assert response.headers["retry-after-ms"] == "2250"


async def test_the_time_left_goes_with_the_request(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    response = await client.post(CHAT, json=BODY | {"n": 2}, headers={"X-Request-Timeout": "30.5"})
    assert response.status_code == 200
    for submission in fake.submissions:
        assert 20 < submission.context.timeout.ToSeconds() <= 30
    # All choices are let in or refused with the first.
    assert [submission.resubmitted for submission in fake.submissions] == [False, True]
    fake.submissions.clear()
    assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert not fake.submissions[0].context.HasField("timeout")


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1e3", "nan", "", "1" * 20])
async def test_a_wrong_timeout_is_refused(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post(CHAT, json=BODY, headers={"X-Request-Timeout": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize("stream", [False, True])
async def test_services_that_do_not_answer(client: httpx.AsyncClient, fake: FakeTokenizer, stream: bool) -> None:
    fake.running.clear()
    response = await client.post(CHAT, json=BODY | {"stream": stream}, headers={"X-Request-Timeout": "0.05"})
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"
    async with asyncio.timeout(5):
        while not fake.aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_stream_whose_time_is_up_ends_with_an_error_event(
    client: httpx.AsyncClient, fake: FakeTokenizer
) -> None:
    fake.error_at = 2, RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "time is up")
    response = await client.post(CHAT, json=BODY | {"stream": True})
    assert response.status_code == 200
    *_, error, done = [line for line in response.text.splitlines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "timeout_error"
    assert done == "data: [DONE]"


async def test_the_operators_bound(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, request_timeout=5) as client:
        await wait_ready(client)
        await client.post(CHAT, json=BODY)
        await client.post(CHAT, json=BODY, headers={"X-Request-Timeout": "600"})
        await client.post(CHAT, json=BODY, headers={"X-Request-Timeout": "2"})
        lefts = [submission.context.timeout.ToMilliseconds() / 1000 for submission in fake.submissions]
        assert 2 < lefts[0] <= 5 and 2 < lefts[1] <= 5 and 0 < lefts[2] <= 2
