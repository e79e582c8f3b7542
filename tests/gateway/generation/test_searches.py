"""Requests with one call and without streamed outputs: best_of and beam search."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import openai
import pytest

from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import eventually
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text

TEXT = "/v1/completions"
BEST = {"prompt": ["one", "two"], "n": 2, "best_of": 4, "seed": 5, "max_tokens": 6, "logprobs": 1}


async def test_the_best_of_each_prompt(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    answer = (await client.post(TEXT, json=BEST)).json()
    expected = [expected_text(prompt, seed, 6) for prompt in ("one", "two") for seed in (8, 7)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [6] * 4
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 24
    assert [(search.n, search.best_of, search.sampling_params.seed) for search in fake.searches] == [(2, 4, 5)] * 2


async def test_echo_and_the_official_client(ai: openai.AsyncOpenAI) -> None:
    answer = await ai.completions.create(model="fake", prompt="one", best_of=3, echo=True, seed=5, max_tokens=6)
    assert [choice.text for choice in answer.choices] == ["one" + expected_text("one", 7, 6)]


async def test_best_of_n_is_no_search_and_may_be_streamed(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = {"prompt": "one", "n": 2, "best_of": 2, "stream": True}
    assert (await client.post(TEXT, json=body)).status_code == 200
    assert not fake.searches and len(fake.received) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"best_of": 1}, "best_of is 1, less than n, which is 2"),
        ({"stream": True}, "remove best_of or stream"),
        ({"best_of": 129}, "less than or equal to 128"),
    ],
)
async def test_what_cannot_be_is_refused(client: httpx.AsyncClient, more: dict[str, Any], message: str) -> None:
    response = await client.post(TEXT, json=BEST | more)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "best_of" and message in error["message"]


async def test_chats_have_no_best_of(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "best_of": 2}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"


async def test_errors_have_their_status(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many wait")
    response = await client.post(TEXT, json=BEST)
    assert response.status_code == 429 and response.json()["error"]["message"] == "too many wait"


async def test_a_search_begins_again_when_the_tokenizer_dies(
    client: httpx.AsyncClient, fake: FakeTokenizer, address: str
) -> None:
    fake.running.clear()
    task = asyncio.create_task(client.post(TEXT, json=BEST))
    await eventually(lambda: len(fake.searches) == 2)
    await fake.stop()
    fake.running.set()
    await fake.start(address)
    answer = (await task).json()
    assert answer["choices"][0]["text"] == expected_text("one", 8, 6)
    assert fake.searches[0].sampling_params.seed == fake.searches[-1].sampling_params.seed


async def test_a_client_that_leaves_ends_its_searches(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.running.clear()
    task = asyncio.create_task(client.post(TEXT, json=BEST))
    await eventually(lambda: len(fake.searches) == 2)
    task.cancel()
    await eventually(lambda: fake.num_cancelled == 2)


async def test_beam_search_of_a_chat(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        **{"n": 3, "use_beam_search": True, "length_penalty": 0, "early_stopping": True, "temperature": 0.3, "seed": 1},
    }
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    expected = [expected_text("<user>hi<assistant>", seed) for seed in (3, 2, 1)]
    assert [choice["message"]["content"] for choice in answer["choices"]] == expected
    (search,) = fake.searches
    assert search.n == 3 and search.beam_search.HasField("length_penalty")
    assert (search.beam_search.length_penalty, search.beam_search.early_stopping) == (0, True)


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"use_beam_search": True, "stream": True}, "use_beam_search", "remove use_beam_search or stream"),
        ({"use_beam_search": True, "best_of": 2}, "best_of", "remove best_of"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", "less than or equal to 10"),
        ({"length_penalty": 2}, "length_penalty", "needs use_beam_search: true"),
        ({"early_stopping": True}, "early_stopping", "needs use_beam_search: true"),
    ],
)
async def test_what_is_no_beam_search_is_refused(
    client: httpx.AsyncClient, more: dict[str, Any], param: str, message: str
) -> None:
    response = await client.post(TEXT, json={"prompt": "one"} | more)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and message in error["message"]
