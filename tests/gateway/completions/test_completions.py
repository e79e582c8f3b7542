"""Text completions, driven by the official client."""

import json

import httpx
import openai
import pytest

from pagewire.config.sampling_params import PARAMETERS
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.makers.sampling_values import a_value, wrong_values


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        (ids("one"), ["one"]),
        ([ids("one"), ids("two")], ["one", "two"]),
    ],
)
async def test_prompt_forms(ai: openai.AsyncOpenAI, prompt: object, texts: list[str]) -> None:
    answer = await ai.completions.create(model="fake", prompt=prompt, seed=2, n=2)  # type: ignore[arg-type]
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert [choice.index for choice in answer.choices] == list(range(2 * len(texts)))
    expected = [expected_text(text, seed, 16) for text in texts for seed in (2, 3)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    assert answer.usage.completion_tokens == 16 * 2 * len(texts)


@pytest.mark.parametrize("prompt", [["one", "two"], [ids("one"), ids("two")]])
async def test_echo_begins_with_the_prompt(ai: openai.AsyncOpenAI, prompt: list[str]) -> None:
    asked = {"model": "fake", "prompt": prompt, "seed": 2, "n": 2, "echo": True}
    expected = [text + expected_text(text, seed, 16) for text in ("one", "two") for seed in (2, 3)]
    answer = await ai.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == expected
    texts = [""] * 4
    async for chunk in await ai.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


async def test_stream(ai: openai.AsyncOpenAI) -> None:
    stream = await ai.completions.create(
        model="alias", prompt=["a", "b"], seed=2, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usage = ["", ""], {}, None
    async for chunk in stream:
        assert chunk.model == "alias"
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        if not chunk.choices:
            usage = chunk.usage
    assert texts == [expected_text("a", 2, 16), expected_text("b", 2, 16)]
    assert reasons == {0: "length", 1: "length"}
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 32)


async def test_logprobs_whole_and_streamed_are_the_same(ai: openai.AsyncOpenAI) -> None:
    answer = await ai.completions.create(model="fake", prompt="p", seed=1, max_tokens=7, logprobs=2)
    whole = answer.choices[0].logprobs
    assert "".join(whole.tokens) == answer.choices[0].text
    assert whole.text_offset == list(range(7))
    assert whole.token_logprobs == [-0.5] * 7
    # The chosen token is among them, and "b" is all but impossible.
    expected = {"a": -1.0, "b": -9999.0} | {whole.tokens[0]: -0.5}
    assert whole.top_logprobs[0] == expected

    stream = await ai.completions.create(model="fake", prompt="p", seed=1, max_tokens=7, logprobs=2, stream=True)
    tokens: list[str] = []
    offsets: list[int] = []
    async for chunk in stream:
        if chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens
            offsets += chunk.choices[0].logprobs.text_offset
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)


async def test_token_ids_on_request(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["ab", "c"], "seed": 1, "max_tokens": 5, "return_token_ids": True, "stream": True}
    response = await client.post("/v1/completions", json=body)
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    prompts = {choice["index"]: choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice}
    assert prompts == {0: ids("ab"), 1: ids("c")}
    tokens = [i for choice in choices if choice["index"] == 1 for i in choice.get("token_ids", [])]
    assert tokens == ids(expected_text("c", 1, 5))

    whole = (await client.post("/v1/completions", json=body | {"stream": False})).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [ids("ab"), ids("c")]
    assert whole[1]["token_ids"] == tokens


async def test_every_parameter_reaches_the_tokenizer(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = {
        "model": "fake", "prompt": "p", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.25,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "logit_bias": {"65": -100, "66": 2.5},
        "seed": -4, "max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1, 2], "logprobs": 0,
        "priority": -3, "stop": "never", "include_stop_str_in_output": True, "skip_special_tokens": False,
        "add_special_tokens": False, "user": "me", "metadata": {"k": "v"}, "store": False, "best_of": 1, "echo": False,
        "allowed_token_ids": [5, 6], "bad_words": ["a b", "c"],
        "cache_salt": "secret", "truncate_prompt_tokens": 3, "truncation_side": "right", "suffix": "s",
    }  # fmt: skip
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    [request] = fake.received
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, pytest.approx(0.9), 7, 0.25)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.5, -0.5)
    assert (list(params.logit_bias_ids), list(params.logit_bias_values)) == ([65, 66], [-100, 2.5])
    assert (params.seed, params.max_tokens, params.min_tokens, params.ignore_eos) == (-4, 9, 2, True)
    assert (list(params.stop_token_ids), params.logprobs, params.priority) == ([1, 2], 0, -3)
    assert params.HasField("logprobs")
    assert (list(params.allowed_token_ids), list(request.bad_words)) == ([5, 6], ["a b", "c"])
    assert (request.cache_salt, request.truncate_prompt_tokens, request.truncate_end) == ("secret", 3, True)
    assert (list(request.stop), request.include_stop_str_in_output, request.suffix) == (["never"], True, "s")
    assert request.HasField("skip_special_tokens") and not request.skip_special_tokens
    assert request.HasField("add_special_tokens") and not request.add_special_tokens


async def test_null_means_unset(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    names = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "logit_bias", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "logprobs", "priority",
        "stop", "n", "stream", "stream_options", "suffix", "echo", "best_of", "user", "model", "skip_special_tokens",
    )  # fmt: skip
    response = await client.post("/v1/completions", json={"prompt": "p"} | dict.fromkeys(names))
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "fake"
    params = fake.received[0].sampling_params
    assert {field.name for field, _ in params.ListFields()} == {"seed", "max_tokens"}
    assert params.max_tokens == 16


async def test_sampling_parameters_are_those_of_the_table(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """The body has every row of the table, with its range; no row is named here."""
    values = {parameter.name: a_value(parameter) for parameter in PARAMETERS}
    response = await client.post("/v1/completions", json={"prompt": "p"} | values)
    assert response.status_code == 200, response.text
    params = fake.received[0].sampling_params
    assert {name: getattr(params, name) for name in values} == values
    for parameter in PARAMETERS:
        for value in ["x", *wrong_values(parameter)]:
            response = await client.post("/v1/completions", json={"prompt": "p", parameter.name: value})
            assert response.status_code == 400, (parameter.name, value)
            assert response.json()["error"]["param"] == parameter.name
