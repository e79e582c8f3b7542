"""TGI's routes, as its clients call them."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Model
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text

TEXT = "/v1/completions"
ASKED: dict[str, Any] = {"inputs": "hello", "parameters": {"max_new_tokens": 6, "seed": 3, "do_sample": True}}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_the_path_has_two_bodies(client: httpx.AsyncClient) -> None:
    theirs = (await client.post("/generate", json=ASKED)).json()
    assert theirs == {"generated_text": expected_text("hello", 3, 6)}
    params = {"max_new_tokens": 6, "sampling_seed": 3}
    sglang = (await client.post("/generate", json={"text": "hello", "sampling_params": params})).json()
    assert sglang["text"] == theirs["generated_text"]
    assert (await client.post("/", json=ASKED)).json() == [theirs]


@pytest.mark.parametrize(
    ("path", "more"), [("/generate_stream", {}), ("/generate", {"stream": True}), ("/", {"stream": True})]
)
async def test_events_have_a_token_each(client: httpx.AsyncClient, path: str, more: dict[str, Any]) -> None:
    text = expected_text("hello", 3, 6)
    for details in (False, True):
        parameters = ASKED["parameters"] | {"details": details, "top_n_tokens": 2}
        *events, last = events_of(await client.post(path, json=ASKED | {"parameters": parameters} | more))
        assert "".join(event["token"]["text"] for event in [*events, last]) == text
        assert [event["index"] for event in [*events, last]] == list(range(1, len(events) + 2))
        assert all(event["generated_text"] is None and event["details"] is None for event in events)
        assert last["generated_text"] == text
        assert last["details"] == {"finish_reason": "length", "generated_tokens": 6, "seed": 3, "input_length": 5}
        assert {event["token"]["logprob"] for event in [*events, last]} == {-0.5}
        assert [len(event.get("top_tokens", ())) for event in events if details] == [2 * details] * len(
            events
        ) * details


async def test_details_have_the_tokens(client: httpx.AsyncClient) -> None:
    parameters = ASKED["parameters"] | {"details": True, "return_full_text": True}
    answer = (await client.post("/generate", json=ASKED | {"parameters": parameters})).json()
    text = expected_text("hello", 3, 6)
    assert answer["generated_text"] == "hello" + text
    assert [token["text"] for token in answer["details"]["tokens"]] == list(text)
    assert (answer["details"]["prefill"], answer["details"]["finish_reason"]) == ([], "length")


async def test_the_body_is_that_of_a_completion(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    parameters = {
        "max_new_tokens": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "repetition_penalty": 1.5, "seed": 1,
        "frequency_penalty": 0.25, "stop": ["x"], "truncate": 3, "grammar": {"type": "regex", "value": "a+"},
        "typical_p": 1.0, "watermark": False, "best_of": 1, "details": False, "decoder_input_details": False,
    }  # fmt: skip
    ours = {
        "prompt": "hello", "max_tokens": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "repetition_penalty": 1.5,
        "seed": 1, "frequency_penalty": 0.25, "stop": ["x"], "truncate_prompt_tokens": 3, "guided_regex": "a+",
        "include_stop_str_in_output": True,
    }  # fmt: skip
    for path, body in (("/generate", {"inputs": "hello", "parameters": parameters}), (TEXT, ours)):
        answer = await client.post(path, json=body, headers={"x-request-id": "same"})
        assert answer.status_code == 200, answer.text
    assert fake.received[0] == fake.received[1]


async def test_the_most_probable_tokens_are_taken_unless_asked(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for parameters, temperature in (
        ({}, 0.0),
        ({"do_sample": True}, None),
        ({"top_p": 0.5}, None),
        ({"temperature": 2.0}, 2.0),
    ):
        await client.post("/generate", json={"inputs": "p", "parameters": {"max_new_tokens": 1, **parameters}})
        params = fake.received[-1].sampling_params
        assert (params.temperature if params.HasField("temperature") else None) == temperature


async def test_schemas_of_a_grammar(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    schema = {"type": "object"}
    for grammar in (
        {"type": "json", "value": schema},
        {"type": "json", "value": json.dumps(schema)},
        {"type": "json_schema", "value": {"name": "n", "schema": schema}},
    ):
        await client.post("/generate", json={"inputs": "p", "parameters": {"max_new_tokens": 1, "grammar": grammar}})
        assert json.loads(fake.received[-1].sampling_params.grammar.json_schema) == schema


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", {"inputs": "p", "parameters": {"watermark": True}}, "parameters.watermark"),
        ("/generate", {"inputs": "p", "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens: "),
        ("/generate", {"inputs": ["p"]}, "inputs: "),
        ("/generate", {"inputs": "p", "text": "q"}, "unknown parameter 'text'"),
        ("/generate_stream", {"text": "q"}, "unknown parameter 'text'"),
        ("/generate_stream", {"inputs": ""}, "inputs: "),
        ("/", {"inputs": "p", "model": "m", "parameters": {"adapter_id": "a"}}, "model: give either"),
        ("/generate", {"inputs": "p", "parameters": {"stop": [""]}}, "parameters.stop"),
        (
            "/generate",
            {"inputs": "p", "parameters": {"grammar": {"type": "cfg", "value": "x"}}},
            "parameters.grammar.type",
        ),
    ],
)
async def test_refusals_are_of_the_kind_that_its_clients_read(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], words: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error.keys() == {"error", "error_type"} and error["error_type"] == "validation"
    assert words in error["error"]


@pytest.mark.parametrize(
    ("path", "body", "is_tgi"),
    [("/generate", '{"inputs": "hi', True), ("/generate", '{"text": "hi', False), ("/", "{", True),
     ("/generate_stream", "[1", True), ("/", "[]", True), ("/generate", '{"inputs": ' + "[" * 5000, True)],
)  # fmt: skip
async def test_broken_json_is_refused_in_the_form_of_its_sender(
    client: httpx.AsyncClient, path: str, body: str, is_tgi: bool
) -> None:
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and (answer.json().keys() == {"error", "error_type"}) == is_tgi, answer.text


async def test_other_bodies_are_refused_as_before(client: httpx.AsyncClient) -> None:
    for body in ({"text": "p", "input": 1}, {}, []):
        error = (await client.post("/generate", json=body)).json()["error"]
        assert error["type"] == "invalid_request_error"


async def test_characters_of_several_tokens_and_stop_strings(http: httpx.AsyncClient, model: Model) -> None:
    model.output = "Ein Ö, 漢字 STOP more"
    parameters = {"max_new_tokens": 50, "stop": ["STOP"], "details": True}
    *events, last = events_of(await http.post("/generate_stream", json={"inputs": "p", "parameters": parameters}))
    assert last["generated_text"] == "Ein Ö, 漢字 STOP"
    assert "".join(event["token"]["text"] for event in [*events, last]) == last["generated_text"]
    assert last["details"]["finish_reason"] == "stop_sequence"
