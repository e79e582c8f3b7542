"""The route /generate, as SGLang's clients call it."""

import itertools
import json
from typing import Any

import httpx
import pytest

from tests.gateway.fake_tokenizer import FakeTokenizer

TEXT = "/v1/completions"


def events_of(text: str) -> list[dict[str, Any]]:
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_one_prompt_has_one_answer(client: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 6, "sampling_seed": 3, "temperature": 0.5}
    answer = (await client.post("/generate", json={"text": "hello", "sampling_params": params, "rid": "mine"})).json()
    completion = {"prompt": "hello", "max_tokens": 6, "seed": 3, "temperature": 0.5, "return_token_ids": True}
    [expected] = (await client.post(TEXT, json=completion)).json()["choices"]
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (expected["text"], expected["token_ids"])
    assert "index" not in answer
    assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 6})
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 6)
    assert meta["e2e_latency"] >= 0


async def test_the_body_is_that_of_a_completion(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    params = {
        "max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 1, "top_k": -1, "top_p": 0.5, "min_p": 0.1,
        "stop": ["x"], "stop_token_ids": [7], "no_stop_trim": True, "ignore_eos": True, "skip_special_tokens": False,
        "frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5, "regex": "a+",
        "logit_bias": {"5": 1.0}, "spaces_between_special_tokens": True,
    }  # fmt: skip
    theirs = {"input_ids": [104, 105], "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    ours = {
        "prompt": [104, 105], "max_tokens": 9, "min_tokens": 2, "seed": 1, "top_k": -1, "top_p": 0.5, "min_p": 0.1,
        "stop": "x", "stop_token_ids": [7], "include_stop_str_in_output": True, "ignore_eos": True,
        "skip_special_tokens": False, "frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5,
        "guided_regex": "a+", "logit_bias": {"5": 1.0}, "logprobs": 2,
    }  # fmt: skip
    for path, body in (("/generate", theirs), (TEXT, ours)):
        answer = await client.post(path, json=body, headers={"x-request-id": "same"})
        assert answer.status_code == 200, answer.text
    assert fake.received[0] == fake.received[1]


async def test_several_outputs_are_a_list(client: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 4, "n": 2, "sampling_seed": 1}
    answer = (await client.post("/generate", json={"text": ["a", "b"], "sampling_params": params, "rid": "r"})).json()
    assert [output["index"] for output in answer] == [0, 1, 2, 3]
    assert [output["meta_info"]["id"] for output in answer] == ["r-0", "r-1", "r-2", "r-3"]
    assert len({output["text"] for output in answer}) == 4
    [only] = (await client.post("/generate", json={"text": ["a"], "sampling_params": {"max_new_tokens": 1}})).json()
    assert only["text"]


async def test_events_have_all_of_the_text_so_far(client: httpx.AsyncClient) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 20, "sampling_seed": 3}}
    whole = (await client.post("/generate", json=body)).json()
    events = events_of((await client.post("/generate", json=body | {"stream": True})).text)
    assert len(events) > 2
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"text": "p", "sampling_params": {"max_new_tokens": 5}, "return_logprob": True, "stream": stream}
    for more in ({}, {"top_logprobs_num": 2, "return_text_in_logprobs": True}):
        answer = await client.post("/generate", json=body | more)
        output = events_of(answer.text)[-1] if stream else answer.json()
        meta = output["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == output["output_ids"]
        texts = [entry[2] for entry in meta["output_token_logprobs"]]
        assert texts == (list(output["text"]) if more else [None] * 5)
        assert [len(entries) for entries in meta.get("output_top_logprobs", [])] == ([2] * 5 if more else [])


async def test_a_stop_string_is_named(client: httpx.AsyncClient) -> None:
    body = {"text": "p", "sampling_params": {"max_new_tokens": 9, "sampling_seed": 3}}
    stop = (await client.post("/generate", json=body)).json()["text"][4]
    body["sampling_params"]["stop"] = stop
    meta = (await client.post("/generate", json=body)).json()["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 9}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "a", "image_data": "x.png"}, "image_data"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    answer = await client.post("/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
