"""Every way a request can fail, in the shape that OpenAI's clients expect."""

import json
from typing import Any

import grpc
import httpx
import openai
import pytest

from pagewire.gateway.core.middleware import MAX_BODY_BYTES
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


TOOL = {"type": "function", "function": {"name": "f"}}
WRONG_VALUES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    (
        CHAT,
        {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"messages": MESSAGES, "tool_choice": TOOL}, "tool_choice"),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    (CHAT, {"messages": MESSAGES, "tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
    (
        CHAT,
        {
            "messages": MESSAGES,
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
        },
        "tool_choice.allowed_tools.tools",
    ),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "enormous"}, "reasoning_effort"),
    (CHAT, {"messages": MESSAGES, "documents": ["text"]}, "documents[0]"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": [1]}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (CHAT, {"messages": [{"role": "user", "name": "a"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "function", "content": "a"}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call.name"),
    (CHAT, {"messages": MESSAGES, "function_call": "auto"}, "function_call"),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ["p"] * 100, "n": 11}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt[1]"),
    (TEXT, {"prompt": [[]]}, "prompt[0]"),
    (TEXT, {"prompt": [-1]}, "prompt[0]"),
    (TEXT, {"prompt": "p", "temperature": "hot"}, "temperature"),
    (TEXT, {"prompt": "p", "temperature": -1}, "temperature"),
    (TEXT, {"prompt": "p", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "p", "top_k": -2}, "top_k"),
    (TEXT, {"prompt": "p", "n": 0}, "n"),
    (TEXT, {"prompt": "p", "n": True}, "n"),
    (TEXT, {"prompt": "p", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "p", "max_tokens": 2.5}, "max_tokens"),
    (TEXT, {"prompt": "p", "min_tokens": 20}, "min_tokens"),
    (TEXT, {"prompt": "p", "stop": ["a", 5]}, "stop[1]"),
    (TEXT, {"prompt": "p", "stop": ""}, "stop"),
    (TEXT, {"prompt": "p", "seed": 2**63}, "seed"),
    (TEXT, {"prompt": "p", "logit_bias": {"a": 1}}, "logit_bias"),
    (TEXT, {"prompt": "p", "logit_bias": {"1": 101}}, "logit_bias"),
    (TEXT, {"prompt": "p", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "p", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (TEXT, {"prompt": "p", "truncation_side": "middle"}, "truncation_side"),
    (TEXT, {"prompt": "p", "bad_words": ["a", ""]}, "bad_words[1]"),
    (TEXT, {"prompt": "p", "allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    (TEXT, {"prompt": "p", "echo": 0}, "echo"),
    (TEXT, {"prompt": "p", "prompt_logprobs": -1}, "prompt_logprobs"),
    (TEXT, {"prompt": "p", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (TEXT, {"prompt": "p", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "p", "max_tokens": 0, "echo": False, "logprobs": 1}, "max_tokens"),
    (TEXT, {"prompt": "p", "cache_salt": ""}, "cache_salt"),
    (TEXT, {"prompt": "p", "cache_salt": "s" * 129}, "cache_salt"),
]


async def test_wrong_values_are_named(client: httpx.AsyncClient) -> None:
    for path, body, param in WRONG_VALUES:
        error = error_of(await client.post(path, json=body), 400)
        assert error["param"] == param, (body, error)
        assert error["type"] == "invalid_request_error"


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"tools": [TOOL]}, "tools"),
    (TEXT, {"prompt": "p", "functions": [{"name": "f"}]}, "functions"),
    (TEXT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (TEXT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"stop_regex": "a+"}, "stop_regex"),
    (CHAT, {"stream_reasoning": False}, "stream_reasoning"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"best_of": 2}, "best_of"),
    (TEXT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
    (CHAT, {"suffix": "end"}, "suffix"),
    # 0 is not false: only a value of the right type means the default.
    (TEXT, {"return_routed_experts": 0}, "return_routed_experts"),
]


async def test_unsupported_parameters_are_refused_by_name(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for path, extra, param in UNSUPPORTED:
        body = {"messages": MESSAGES} if path == CHAT else {"prompt": "p"}
        error = error_of(await client.post(path, json=body | extra), 400)
        assert (error["param"], error["code"]) == (param, "unsupported_parameter"), (extra, error)
        assert param.rpartition(".")[2] in error["message"] or "input_audio" in error["message"]
    assert not fake.received


@pytest.mark.parametrize(("extra", "nearest"), [({"temprature": 1}, "temperature"), ({"max_token": 5}, "max_tokens")])
async def test_unknown_parameters_are_refused_with_the_nearest_name(
    client: httpx.AsyncClient, extra: dict[str, Any], nearest: str
) -> None:
    error = error_of(await client.post(CHAT, json={"messages": MESSAGES} | extra), 400)
    assert error["param"] == next(iter(extra))
    assert f"did you mean '{nearest}'" in error["message"]


@pytest.mark.parametrize(
    ("content", "headers", "words"),
    [
        (b'{"prompt": ', {"content-type": "application/json"}, "not valid JSON"),
        (b"[1]", {"content-type": "application/problem+json"}, "JSON object"),
        (b"[1]", {"content-type": "application/json"}, "JSON object"),
        (b"", {"content-type": "application/json"}, "the body must be a JSON object"),
        (b'{"seed": ' + 5000 * b"1" + b"}", {"content-type": "application/json"}, "an integer of more than 640 digits"),
        (b'{"prompt": "p"}', {"content-type": "text/plain"}, "Content-Type"),
        (b'{"prompt": "p", "temperature": NaN}', {"content-type": "application/json"}, "temperature"),
        (b'{"prompt": "\xff"}', {"content-type": "application/json"}, "not UTF-8 at byte 12"),
        (b'{"prompt": ' + 100_000 * b"[", {"content-type": "application/json"}, "nested too deeply"),
        (b'{"prompt": "\\ud800"}', {"content-type": "application/json"}, "surrogate"),
        (b'{"prompt": "p", "metadata": {"a": ["\\uDE00\\uD83d"]}}', {"content-type": "application/json"}, "surrogate"),
    ],
)
async def test_bad_bodies(client: httpx.AsyncClient, content: bytes, headers: dict[str, str], words: str) -> None:
    error = error_of(await client.post(TEXT, content=content, headers=headers), 400)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("code", "status", "exception"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400, openai.BadRequestError),
        (grpc.StatusCode.NOT_FOUND, 404, openai.NotFoundError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, openai.RateLimitError),
        (grpc.StatusCode.INTERNAL, 500, openai.InternalServerError),
        (grpc.StatusCode.UNAVAILABLE, 503, openai.InternalServerError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_statuses_from_upstream(
    ai: openai.AsyncOpenAI, fake: FakeTokenizer, code: grpc.StatusCode, status: int, exception: type, stream: bool
) -> None:
    fake.error = RpcError(code, "the reason")
    with pytest.raises(exception) as caught:
        await ai.chat.completions.create(model="fake", messages=MESSAGES, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.body["message"] == "the reason"
    assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))


async def test_prompt_too_long_says_both_numbers(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    error = error_of(await client.post(TEXT, json={"prompt": "x" * 2000}), 400)
    assert "2000" in error["message"] and "1000" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "lowers"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 5}, False),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 5}, False),
        (TEXT, {"prompt": "p", "max_tokens": 5}, False),
        (TEXT, {"prompt": "p"}, True),
        ("/v1/responses", {"input": "p", "max_output_tokens": 5}, False),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, True),
        ("/generate", {"text": "p", "sampling_params": {"max_new_tokens": 5}}, False),
        ("/generate", {"text": "p"}, True),
    ],
)
async def test_max_tokens_of_a_client_is_not_lowered_in_silence(
    client: httpx.AsyncClient, fake: FakeTokenizer, path: str, body: dict[str, object], lowers: bool
) -> None:
    """The scheduler refuses one that is too large, unless it is a default or the API reports it."""
    assert (await client.post(path, json=body)).status_code == 200
    [request] = fake.received
    assert request.clamp_max_tokens == lowers


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    for response in (
        await client.post(CHAT, json={"model": "missing", "messages": MESSAGES}),
        await client.post("/tokenize", json={"model": "missing", "prompt": "p"}),
        await client.get("/v1/models/missing"),
    ):
        error = error_of(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "fake" in error["message"]


async def test_unknown_route_and_method(client: httpx.AsyncClient) -> None:
    assert "/v1/nothing" in error_of(await client.get("/v1/nothing"), 404)["message"]
    response = await client.get(CHAT)
    assert "GET" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"
    # Of all routes with this path.
    assert (await client.put("/v1/files")).headers["allow"] == "GET, POST"


async def test_a_number_without_a_fraction_is_an_integer(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """JSON has numbers only, and some clients write all of them with a point."""
    whole = {"prompt": [97, 98.0, 99.0], "max_tokens": 3.0, "n": 1.0, "stop_token_ids": [5.0], "top_p": 1}
    response = await client.post(TEXT, content=json.dumps(whole), headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    [request] = fake.received
    assert list(request.token_ids.ids) == [97, 98, 99]
    assert (request.sampling_params.max_tokens, list(request.sampling_params.stop_token_ids)) == (3, [5])
    for wrong in ({"max_tokens": 3.5}, {"prompt": [97, 98.5]}, {"max_tokens": "3"}, {"n": True}):
        error_of(await client.post(TEXT, json={"prompt": "p"} | wrong), 400)


async def test_body_too_large(client: httpx.AsyncClient) -> None:
    content = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {"content-type": "application/json"}
    error_of(await client.post(TEXT, content=content, headers=headers), 413)

    async def chunks():
        for start in range(0, len(content), 1 << 20):
            yield content[start : start + (1 << 20)]

    error_of(await client.post(TEXT, content=chunks(), headers=headers), 413)


async def test_error_after_the_stream_began(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    fake.error_at = (5, RpcError(grpc.StatusCode.UNAVAILABLE, "no executor"))
    stream = await ai.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="no executor"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert len(text) == 5


async def test_one_failed_choice_ends_the_others_upstream(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error_at = (5, RpcError(grpc.StatusCode.INTERNAL, "broken"))
    response = await client.post(TEXT, json={"prompt": "p", "n": 3})
    assert error_of(response, 500)["message"] == "broken"


async def test_no_tokenizer(address: str) -> None:
    async with running_gateway(address) as client:
        for response in (
            await client.post(CHAT, json={"model": "fake", "messages": MESSAGES}),
            await client.post("/tokenize", json={"prompt": "p"}),
        ):
            error_of(response, 503)
            assert response.headers["retry-after"]


async def test_api_key(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, api_key="sésame") as client:
        await wait_ready(client)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/livez")).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
            response = await client.get(path)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        wrong = {"authorization": "Bearer sesame"}
        error_of(await client.post(CHAT, json={"messages": MESSAGES}, headers=wrong), 401)
        right = {"authorization": "Bearer sésame".encode()}
        assert (await client.post(CHAT, json={"messages": MESSAGES}, headers=right)).status_code == 200


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling_params.top_p", "top_p"),
        ("token_ids.ids", "prompt"),
        ("chat.messages[2].parts[0].image.url", "messages"),
        ("chat.tools", "tools"),
        ("chat.documents_json[0]", "documents[0]"),
        ("sampling_params.logit_bias_ids", "logit_bias"),
        ("beam_search.length_penalty", "length_penalty"),
        ("stop[1]", "stop[1]"),
    ],
)
async def test_what_the_line_refuses_is_named_as_the_route_calls_it(
    client: httpx.AsyncClient, fake: FakeTokenizer, field: str, param: str | None
) -> None:
    fake.error = RpcError(grpc.StatusCode.INVALID_ARGUMENT, "it is wrong", [(field, "it is wrong")])
    response = await client.post("/v1/completions", json={"prompt": "p"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "zzz"}}}
_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "zzz"}}}
_CLAUDE = {"max_tokens": 9, "messages": MESSAGES, "model": "m"}


@pytest.mark.parametrize(
    ("path", "body", "inner", "param", "message"),
    [
        (CHAT, {"logit_bias": {"1": 2}}, ("logit_bias_ids", "logit_bias_ids has 7"), "logit_bias", "logit_bias has 7"),
        (CHAT, {"logprobs": True}, ("logprobs", "logprobs is 99"), "top_logprobs", "top_logprobs is 99"),
        (CHAT, {"response_format": _FORM}, ("grammar", "json_schema: no"), "response_format",
         "response_format: json_schema: no"),
        (CHAT, {"guided_regex": "("}, ("grammar", "regex: ("), "guided_regex", "guided_regex: regex: ("),
        (CHAT, {"regex": "("}, ("grammar", "regex: ("), "regex", "regex: ("),
        (CHAT, {"tools": [_TOOL]}, ("grammar", "structural_tag at #/format/json_schema/type: zzz"), "tools",
         "tools: the schema of a tool's parameters cannot be used: structural_tag at #/format/json_schema/type: zzz"),
        ("/v1/responses", {"input": "hi"}, ("max_tokens", "max_tokens is 0"), "max_output_tokens",
         "max_output_tokens is 0"),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
         ("grammar", "json_schema: no"), "text.format", "text.format: json_schema: no"),
        ("/v1/messages", _CLAUDE, ("stop", "stop has 2000 strings"), None, "stop_sequences has 2000 strings"),
        ("/v1/messages", _CLAUDE, ("max_tokens", "max_tokens and stop"), None, "max_tokens and stop"),
        ("/generate", {"text": "p", "sampling_params": {"regex": "("}}, ("grammar", "regex: ("),
         "sampling_params.regex", "sampling_params.regex: regex: ("),
        ("/v1/embeddings", {"input": ["a", "b"]}, ("inputs[1]", "inputs[1] has 9"), "input[1]", "input[1] has 9"),
        ("/v1/embeddings", {"input": "a"}, ("inputs[0]", "inputs[0] has 9"), "input", "input has 9"),
        ("/v1/embeddings", {"messages": MESSAGES}, ("inputs[0].chat", "it has images"), "messages", "it has images"),
        ("/v2/embed", {"texts": ["a"]}, ("inputs[0]", "inputs[0] has 9"), "texts[0]", "texts[0] has 9"),
        ("/rerank", {"query": "q", "documents": ["a"]}, ("pairs[0]", "pairs[0] has 9"), "documents[0]",
         "documents[0] has 9"),
        ("/score", {"text_1": "q", "text_2": "a"}, ("pairs[0]", "pairs[0] has 9"), "text_2", "text_2 has 9"),
        ("/generate", {"input_ids": [9]}, ("token_ids.ids", "token_ids.ids has 9"), "input_ids", "input_ids has 9"),
    ],
)  # fmt: skip
async def test_fields_have_the_names_that_the_client_has_sent(
    client: httpx.AsyncClient, fake: FakeTokenizer, path: str, body: Any, inner: Any, param: str | None, message: str
) -> None:
    field, said = inner
    path_in_grpc = field if set(".[") & set(field) or field == "stop" else f"sampling_params.{field}"
    fake.error = RpcError(grpc.StatusCode.INVALID_ARGUMENT, said, [(path_in_grpc, said)])
    generates = path in (CHAT, "/v1/responses", "/v1/messages", "/generate")
    for extra in ({"stream": False}, {"stream": True}) if generates else ({},):
        json = body | extra | ({"messages": MESSAGES} if path == CHAT else {})
        response = await client.post(path, json=json)
        error = response.json()["error"]
        assert (response.status_code, error.get("param"), error["message"]) == (400, param, message)
