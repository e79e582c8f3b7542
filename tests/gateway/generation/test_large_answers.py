"""Whole answers with many log probabilities."""

import asyncio

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.gateway.generation import choice_limits, whole
from pagewire.v1.common_pb2 import Logprobs
from pagewire.v1.inference_pb2 import PromptLogprobs
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.sweep import examples

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


@pytest.mark.parametrize(("prompt", "num_begun"), [(list(range(1, 900)), 0), ("hello " * 150, 16)])
async def test_an_answer_that_is_too_large_is_refused(
    client: httpx.AsyncClient,
    fake: FakeTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    prompt: str | list[int],
    num_begun: int,
) -> None:
    """A prompt of token ids shows how much there will be, so that nothing is computed."""
    monkeypatch.setattr(choice_limits, "MAX_ANSWER_BYTES", 100_000)
    answer = await client.post(COMPLETIONS, json=body(16) | {"prompt": prompt})
    assert answer.status_code == 400 and "fewer choices" in answer.json()["error"]["message"]
    assert len(fake.submissions) == num_begun
    assert (await client.post(COMPLETIONS, json=body(1) | {"prompt_logprobs": None})).status_code == 200


async def test_a_streamed_echo_may_be_as_large(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_limits, "MAX_ANSWER_BYTES", 10_000)
    echo = body(1) | {"prompt_logprobs": None, "logprobs": 1, "echo": True}
    assert (await client.post(COMPLETIONS, json=echo)).status_code == 400
    assert (await client.post(COMPLETIONS, json=echo | {"stream": True})).status_code == 200


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 3))
@settings(max_examples=examples(30))
def test_no_answer_is_refused_that_could_be_small_enough(num_tokens: int, num_alternatives: int, num: int) -> None:
    """The smallest answer has ids of one byte and texts of one letter."""
    num_entries = (num_tokens - 1) * (1 + num_alternatives)
    smallest = PromptLogprobs(
        logprobs=Logprobs(
            entries_per_token=1 + num_alternatives,
            token_ids=[1] * num_entries,
            logprobs=[-1.0] * num_entries,
            ranks=[1] * (num_tokens - 1),
        ),
        tokens=[""] * num_entries,
        text_offsets=range(num_tokens),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice_limits, "MAX_ANSWER_BYTES", smallest.ByteSize() * num)
        choice_limits.check_prompt_logprobs(num_alternatives, [[1] * num_tokens, "text"], num)
