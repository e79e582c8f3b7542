"""Log probabilities of prompts, and of prompts that are echoed."""

import json
from typing import Any

import httpx
import openai
import pytest

from pagewire.gateway.completions.logprobs import completion_logprobs, echoed_logprobs
from pagewire.gateway.generation.logprobs import prompt_logprobs
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import PromptLogprobs, TokenLogprob
from tests.gateway.conftest import eventually
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def entries(token: str, num_top: int = 2) -> dict[str, Any]:
    """Returns the entries of a token of a prompt: the third most probable, after "a" and "b"."""
    alternatives = {
        str(ord(c)): {"logprob": -1.0 - i, "rank": 1 + i, "decoded_token": c} for i, c in enumerate("ab"[:num_top])
    }
    return {str(ord(token)): {"logprob": -2.5, "rank": 3, "decoded_token": token}} | alternatives


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json={"seed": 1, "max_tokens": 3} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream_of(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(TEXT, json={"seed": 1, "max_tokens": 3, "stream": True} | body)
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


async def test_each_prompt_of_a_text_completion(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    answer = await post(client, TEXT, prompt=["xyz", "q"], n=2, prompt_logprobs=2)
    first, same, second, alike = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert first == same == [None, entries("y"), entries("z")]
    assert list(first[1]) == [str(ord(c)) for c in "yab"], "the prompt's own token is the first"
    assert second == alike == [None]
    assert [one.sampling_params.HasField("prompt_logprobs") for one in fake.received] == [True, False] * 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    plain = await post(client, TEXT, prompt="xyz")
    assert "prompt_logprobs" not in plain["choices"][0]


async def test_a_chat_reports_them_once(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, messages=MESSAGES, n=2, prompt_logprobs=0)
    reported = answer["prompt_logprobs"]
    prompt = "<user>hi<assistant>"
    assert reported == [None, *(entries(char, 0) for char in prompt[1:])]
    assert "prompt_logprobs" not in answer["choices"][0]
    assert "prompt_logprobs" not in await post(client, CHAT, messages=MESSAGES)


@pytest.mark.parametrize("prompt", ["xyz", [ord(c) for c in "xyz"]])
async def test_echo_has_the_prompts_own(client: httpx.AsyncClient, prompt: object) -> None:
    (choice,) = (await post(client, TEXT, prompt=prompt, echo=True, logprobs=1))["choices"]
    output = expected_text("xyz", 1, 3)
    assert choice["text"] == "xyz" + output
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*"xyz", *output]
    assert logprobs["token_logprobs"] == [None, -2.5, -2.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][:3] == [None, {"y": -2.5, "a": -1.0}, {"z": -2.5, "a": -1.0}]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]


async def test_echo_alone_scores_the_prompt(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    """Covers the requests of lm-evaluation-harness."""
    answer = await ai.completions.create(
        model="fake", prompt=["xyz", "pq"], echo=True, max_tokens=0, logprobs=1, temperature=0, seed=1
    )
    assert [choice.text for choice in answer.choices] == ["xyz", "pq"]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert [choice.logprobs.token_logprobs for choice in answer.choices] == [[None, -2.5, -2.5], [None, -2.5]]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 0, 5)
    assert [one.sampling_params.max_tokens for one in fake.received] == [1, 1]
    plain = await ai.completions.create(model="fake", prompt="xyz", echo=True, max_tokens=0)
    assert (plain.choices[0].text, plain.choices[0].logprobs, plain.usage.completion_tokens) == ("xyz", None, 0)


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_stream_says_the_same_as_a_whole_answer(client: httpx.AsyncClient, max_tokens: int) -> None:
    asked = {"prompt": ["xyz", "pq"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    whole = await post(client, TEXT, **asked, return_token_ids=True)
    chunks = await stream_of(client, **asked, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        reported = [part["logprobs"] for part in parts if part["logprobs"]]
        for name, column in choice["logprobs"].items():
            assert [value for part in reported for value in part[name]] == column
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert len(choice["token_ids"]) == max_tokens


async def test_tokens_may_be_named_by_their_ids(client: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "prompt": "xy", "echo": True, "logprobs": 1}
    (choice,) = (await post(client, TEXT, **asked))["choices"]
    output = expected_text("xy", 1, 3)
    assert choice["text"] == "xy" + output
    assert choice["logprobs"]["tokens"] == [f"token_id:{ord(c)}" for c in "xy" + output]
    assert choice["logprobs"]["top_logprobs"][1] == {f"token_id:{ord('y')}": -2.5, f"token_id:{ord('a')}": -1.0}
    assert set(choice["logprobs"]["top_logprobs"][2]) == {f"token_id:{ord(c)}" for c in (output[0], "a")}
    answer = await post(client, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    (first, *_) = answer["choices"][0]["logprobs"]["content"]
    content = answer["choices"][0]["message"]["content"]
    assert (first["token"], first["bytes"]) == (f"token_id:{ord(content[0])}", list(content[0].encode()))
    assert first["top_logprobs"][0]["token"] == f"token_id:{ord('a')}"


@pytest.mark.parametrize("break_at", [0, 2])
async def test_a_tokenizer_that_dies_reports_them_once(
    client: httpx.AsyncClient, fake: FakeTokenizer, break_at: int
) -> None:
    """A resubmitted request asks for them before the first token, but not after it."""
    fake.break_at = break_at
    chunks = await stream_of(client, prompt="xyz", echo=True, logprobs=0, max_tokens=6)
    await eventually(lambda: fake.break_at is None)
    assert len(fake.received) == 2
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(part["text"] for part in parts) == "xyz" + expected_text("xyz", 1, 6)
    logprobs = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
    assert logprobs == [None, -2.5, -2.5, *[-0.5] * 6]


def test_the_chosen_token_stays_among_others_with_its_text() -> None:
    """Several tokens can have the same text, as incomplete bytes do."""
    others = [TokenLogprob(token_id=i, token="\ufffd", logprob=-float(i)) for i in (1, 2)]
    chosen = TokenLogprob(token_id=3, token="\ufffd", logprob=-3, top_logprobs=[*others])
    more = TokenLogprob(token_id=4, token="x", logprob=-3, top_logprobs=others)
    columns = completion_logprobs([chosen, more], as_ids=False)
    assert columns.top_logprobs == [{"\ufffd": -3.0}, {"x": -3.0, "\ufffd": -1.0}]
    by_id = completion_logprobs([chosen], as_ids=True).top_logprobs
    assert by_id == [{"token_id:3": -3.0, "token_id:1": -1.0, "token_id:2": -2.0}]

    entries = common_pb2.Logprobs(entries_per_token=3, token_ids=[3, 1, 2], logprobs=[-3, -1, -2])
    prompt = PromptLogprobs(
        logprobs=entries, tokens=["\ufffd", "\ufffd", "a"], first_token="x", text="xy", text_offsets=[0, 1]
    )
    assert echoed_logprobs(prompt, [9, 3], 2, as_ids=False).top_logprobs == [None, {"\ufffd": -3.0, "a": -2.0}]


def test_a_prompt_that_was_not_computed_has_no_logprobs() -> None:
    """Log probabilities are absent if the request was aborted before."""
    assert prompt_logprobs(None, 2) is None
    assert echoed_logprobs(None, [1, 2], 2, as_ids=False).tokens == []
