"""Whole answers with many log probabilities."""

import asyncio

import httpx
import pytest

from pagewire.gateway.generation import whole
from tests.gateway.fake_tokenizer import FakeTokenizer

COMPLETIONS = "/v1/completions"


def body(n: int) -> dict[str, object]:
    return {"model": "fake", "prompt": list(range(1, 900)), "max_tokens": 2, "n": n, "prompt_logprobs": 5, "seed": 1}


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The answers that were made in a thread."""
    made: list[object] = []
    to_thread = asyncio.to_thread

    async def noted(function: object, *arguments: object) -> object:
        made.append(function)
        return await to_thread(function, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(whole.asyncio, "to_thread", noted)
    return made


async def test_a_large_answer_is_that_of_one_piece(
    client: httpx.AsyncClient, in_threads: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_LARGE", 10**9)
    monkeypatch.setattr(whole, "_PIECE", 10**9)
    at_once = (await client.post(COMPLETIONS, json=body(4))).raise_for_status().json()
    assert not in_threads
    monkeypatch.setattr(whole, "_LARGE", 1000)
    monkeypatch.setattr(whole, "_PIECE", 777)
    large = (await client.post(COMPLETIONS, json=body(4))).raise_for_status().json()
    assert in_threads and large["choices"] == at_once["choices"]
    assert len(large["choices"][3]["prompt_logprobs"]) == 899


async def test_an_answer_that_is_too_large_is_refused(
    client: httpx.AsyncClient, fake: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "MAX_ANSWER_BYTES", 100_000)
    answer = await client.post(COMPLETIONS, json=body(16))
    assert answer.status_code == 400 and "fewer choices" in answer.json()["error"]["message"]
    assert (await client.post(COMPLETIONS, json=body(1) | {"prompt_logprobs": None})).status_code == 200
