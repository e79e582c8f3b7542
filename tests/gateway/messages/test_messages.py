"""Anthropic's Messages API: what its clients send and see."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import grpc
import httpx
import pytest

from pagewire.gateway.core.middleware import MAX_BODY_BYTES
from pagewire.v1 import inference_pb2
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import anthropic_client, eventually, running_gateway, wait_ready
from tests.gateway.core.test_openapi import check
from tests.gateway.fake_tokenizer import NUM_CACHED_TOKENS, FakeTokenizer

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
NUM_PROMPT = len("<user>hi<assistant>")


@pytest.fixture
async def claude(client: httpx.AsyncClient) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The official client."""
    async with anthropic_client(client) as official:
        yield official


def says(fake: FakeTokenizer, text: str) -> None:
    """All at once."""
    fake.generate = lambda prompt, seed, num_tokens: text[:num_tokens]
    fake.tokens_per_step = 100


async def chat_of(client: httpx.AsyncClient, fake: FakeTokenizer, **body: Any) -> inference_pb2.ChatPrompt:
    """Returns the chat that the tokenizer service receives for a body."""
    response = await client.post(MESSAGES, json=BODY | body)
    assert response.status_code == 200, response.text
    return fake.received[-1].chat


# Answers.


async def test_whole(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    says(fake, "Hello!")
    response = await client.post(MESSAGES, json=BODY | {"max_tokens": 6}, headers={"x-request-id": "mine"})
    assert response.json() == {
        "id": "msg_mine",
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": NUM_PROMPT - NUM_CACHED_TOKENS,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": NUM_CACHED_TOKENS,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert response.headers["request-id"] == "mine"


async def test_the_bytes_of_a_stream_are_the_documented_ones(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    says(fake, 'Hé "you"\n')
    body = BODY | {"stream": True, "stop_sequences": ["\n"], "max_tokens": 20}
    response = await client.post(MESSAGES, json=body, headers={"x-request-id": "mine"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    counts = (
        '"input_tokens":16,"cache_creation_input_tokens":0,"cache_read_input_tokens":3,'
        '"output_tokens":9,"output_tokens_details":{"thinking_tokens":0}'
    )
    assert response.text == (
        "event: message_start\n"
        'data: {"type":"message_start","message":{"id":"msg_mine","type":"message","role":"assistant","model":"fake",'
        '"content":[],"stop_reason":null,"stop_sequence":null,"usage":{' + counts + "}}}\n\n"
        "event: content_block_start\n"
        'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
        "event: ping\n"
        'data: {"type":"ping"}\n\n'
        "event: content_block_delta\n"
        'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hé \\"you\\""}}\n\n'
        "event: content_block_stop\n"
        'data: {"type":"content_block_stop","index":0}\n\n'
        "event: message_delta\n"
        'data: {"type":"message_delta","delta":{"stop_reason":"stop_sequence","stop_sequence":"\\n"},"usage":{'
        + counts
        + "}}\n\n"
        "event: message_stop\n"
        'data: {"type":"message_stop"}\n\n'
    )


async def test_the_official_client(claude: anthropic.AsyncAnthropic, fake: FakeTokenizer) -> None:
    fake.generate = lambda prompt, seed, num_tokens: "Paging is a story."
    whole = await claude.messages.create(**BODY)
    async with claude.messages.stream(**BODY) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text == "Paging is a story."
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    count = await claude.messages.count_tokens(model="fake", messages=BODY["messages"])
    assert count.input_tokens == NUM_PROMPT + 1  # of whole.usage's, and the fake's BOS
    assert fake.received[-1].sampling_params.max_tokens == 8


async def test_models(claude: anthropic.AsyncAnthropic, client: httpx.AsyncClient) -> None:
    models = [model async for model in claude.models.list()]
    assert [(model.id, model.display_name, model.type) for model in models] == [
        ("fake", "fake", "model"),
        ("alias", "alias", "model"),
    ]
    model = await claude.models.retrieve("alias")
    assert (model.created_at.isoformat(), model.max_input_tokens) == ("2023-11-14T22:13:20+00:00", 1000)
    # Other clients see what they know.
    assert (await client.get("/v1/models")).json()["object"] == "list"


async def test_leaving_a_stream_aborts_upstream(claude: anthropic.AsyncAnthropic, fake: FakeTokenizer) -> None:
    async with claude.messages.stream(**BODY | {"max_tokens": 900}) as stream:
        async for _ in stream.text_stream:
            break
    await eventually(lambda: fake.aborted)


# From bodies to requests.


async def test_parameters(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = BODY | {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "stop_sequences": ["\n", "END"],
        "cache_salt": "mine",
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "speed": "standard",
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "context_management": {"edits": []},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2025-01-01"}
    assert (await client.post(f"{MESSAGES}?beta=true", json=body, headers=headers)).status_code == 200
    [request] = fake.received
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.25, 7, 8)
    assert (list(request.stop), request.cache_salt, request.model) == (["\n", "END"], "mine", "fake")


@pytest.mark.parametrize(
    ("system", "seen"),
    [
        ("Be brief.", ["Be brief."]),
        ([{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], ["Be brief."]),
        ([{"type": "text", "text": "x-anthropic-billing-header: a=1"}, {"type": "text", "text": "Be."}], ["Be."]),
        ([], []),
    ],
)
async def test_system(client: httpx.AsyncClient, fake: FakeTokenizer, system: Any, seen: list[str]) -> None:
    chat = await chat_of(client, fake, system=system)
    assert [message.content for message in chat.messages if message.role == "system"] == seen
    assert chat.messages[-1].content == "hi"


async def test_content(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """Turns of several messages and messages of several blocks."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    marked = {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [marked, image, linked]},
        {"role": "assistant", "content": []},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I lo"},
                {"type": "text", "text": "ok.", "citations": None},
                {"type": "tool_use", "id": "call-1", "name": "look", "input": {"at": "é", "n": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call-1", "content": "grey"},
                {"type": "tool_result", "tool_use_id": "call-2", "content": "no such place", "is_error": True},
                {"type": "tool_result", "tool_use_id": "call-3", "content": [marked, image]},
                {"type": "tool_result", "tool_use_id": "call-4", "content": [marked, image], "is_error": True},
                {"type": "tool_result", "tool_use_id": "call-5"},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And?"},
    ]
    chat = await chat_of(client, fake, messages=messages, tools=[TOOL])
    turn, answer, *results, question, system, last = chat.messages
    urls = [part.image.url or part.text for part in turn.parts]
    assert (turn.role, urls) == ("user", ["one", "two", "data:image/png;base64,AAAA", "https://example.org/a.png"])
    assert (answer.role, answer.content, answer.reasoning) == ("assistant", "I look.", "Hm.")
    [call] = answer.tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("call-1", "look", {"at": "é", "n": [1]})
    assert [(result.role, result.tool_call_id) for result in results] == [("tool", f"call-{n}") for n in range(1, 6)]
    assert [result.content for result in results] == ["grey", "Error: no such place", "", "", ""]
    assert [part.text for part in results[2].parts] == ["two", ""]
    assert [part.text for part in results[3].parts] == ["Error:", "two", ""]
    assert [(m.role, m.content) for m in (question, system, last)] == [
        ("user", "So?"),
        ("system", "Be brief."),
        ("user", "And?"),
    ]
    [tool] = chat.tools
    assert (tool.name, tool.description, json.loads(tool.parameters_json)) == ("look", "Looks.", {"type": "object"})


async def test_an_assistants_last_message_is_gone_on_with(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    chat = await chat_of(client, fake, messages=[*BODY["messages"], {"role": "assistant", "content": "It is ("}])
    assert chat.continue_final_message and not chat.add_generation_prompt
    for nothing in ("", [], [{"type": "text", "text": ""}]):
        chat = await chat_of(client, fake, messages=[*BODY["messages"], {"role": "assistant", "content": nothing}])
        assert [message.role for message in chat.messages] == ["user"]
        assert not chat.continue_final_message


async def test_thinking(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    def variables(chat: inference_pb2.ChatPrompt) -> tuple[str, Any]:
        return chat.reasoning_effort, json.loads(chat.chat_template_kwargs_json or "null")

    thinks = {"enable_thinking": True, "thinking": True}
    adaptive = {"type": "adaptive"}
    assert variables(await chat_of(client, fake)) == ("", None)
    assert variables(await chat_of(client, fake, thinking={"type": "disabled"})) == ("none", None)
    assert variables(await chat_of(client, fake, thinking=adaptive)) == ("", thinks)
    assert variables(await chat_of(client, fake, thinking={"type": "enabled", "display": "omitted"})) == ("", thinks)
    assert not fake.received[-1].HasField("thinking_token_budget")
    await chat_of(client, fake, thinking={"type": "enabled", "budget_tokens": 1024})
    assert fake.received[-1].thinking_token_budget == 1024
    effort = {"output_config": {"effort": "low"}}
    assert variables(await chat_of(client, fake, thinking=adaptive, **effort)) == ("low", thinks)


async def test_tool_choice(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    async def request(**choice: Any) -> inference_pb2.GenerateRequest:
        await chat_of(client, fake, tools=[TOOL], tool_choice=choice)
        return fake.received[-1]

    auto = await request(type="auto", disable_parallel_tool_use=True)
    assert auto.output_parsing.tool_calls and auto.output_parsing.first_tool_call_only
    required = await request(type="any")
    assert required.output_parsing.required and not required.output_parsing.HasField("first_tool_call_only")
    several = await request(type="any", disable_parallel_tool_use=False)
    assert several.output_parsing.HasField("first_tool_call_only")
    assert not several.output_parsing.first_tool_call_only
    assert (await request(type="tool", name="look")).output_parsing.named == "look"
    none = await request(type="none")
    assert not none.chat.tools and not none.output_parsing.tool_calls


@pytest.mark.parametrize("name", ["output_config", "output_format"])
async def test_the_form_of_the_answer(client: httpx.AsyncClient, fake: FakeTokenizer, name: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    await chat_of(client, fake, **{name: {"format": form} if name == "output_config" else form})
    assert json.loads(fake.received[-1].sampling_params.grammar.json_schema) == schema


async def test_tools_that_are_not_shown_are_not_counted(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = {"messages": BODY["messages"], "tools": [TOOL], "tool_choice": {"type": "none"}, "system": "Be."}
    response = await client.post(COUNT, json=body)
    assert response.json() == {"input_tokens": NUM_PROMPT + len("^<system>Be.")}


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "any"}, {"required": True}),
        ({"type": "tool", "name": "look"}, {"named": "look"}),
        ({"type": "auto"}, {}),
    ],
)
async def test_the_tools_that_must_be_called_are_counted(
    client: httpx.AsyncClient, fake: FakeTokenizer, choice: dict[str, str], forced: dict[str, Any]
) -> None:
    """The tokenizer service tells a model of them, so it must know of them when it counts."""
    body = {"messages": BODY["messages"], "tools": [TOOL], "tool_choice": choice}
    assert (await client.post(COUNT, json=body)).status_code == 200
    assert fake.tokenized[-1].output_parsing == inference_pb2.OutputParsing(**forced)
    await chat_of(client, fake, **body)
    sent = fake.received[-1].output_parsing
    assert sent.WhichOneof("forced") == fake.tokenized[-1].output_parsing.WhichOneof("forced")


# Errors.


def error_of(response: httpx.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    (user({"type": "document", "source": {}}), "'document'"),
    (user(CALL), "role 'user' can have"),
    (user(RESULT | {"content": [{"type": "search_result"}]}), "'search_result'"),
    (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), "'file'"),
    (user(), "content"),
    ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, "end with text"),
    ({"messages": [{"role": "assistant", "content": [CALL, {"type": "text", "text": "x"}]}]}, "call no tool"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "defer_loading"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"temprature": 1}, "did you mean 'temperature'"),
]


@pytest.mark.parametrize(("body", "said"), WRONG)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, body: dict[str, Any], said: str) -> None:
    error = error_of(await client.post(MESSAGES, json=BODY | body), 400)
    assert error["type"] == "invalid_request_error" and said in error["message"]


async def test_errors_have_anthropics_shape(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    assert error_of(await client.post(MESSAGES, content=b"{"), 400)["type"] == "invalid_request_error"
    assert error_of(await client.get(MESSAGES), 405)["type"] == "invalid_request_error"
    assert error_of(await client.post(f"{MESSAGES}/batches", json={}), 404)["type"] == "not_found_error"
    assert error_of(await client.post(COUNT, json={"model": "missing"} | user(RESULT)), 404)["message"]
    version = {"anthropic-version": "2023-06-01"}
    assert error_of(await client.get("/v1/models/missing", headers=version), 404)["type"] == "not_found_error"
    for path, body in (("/v1/chat/completions", {}), ("/v1/embeddings", {}), ("/v1/nothing", {}), ("/tokenize", {})):
        answer = await client.post(path, json=body, headers=version)
        assert set(answer.json()) == {"error"}, "the route's own shape"
    large = await client.post(MESSAGES, content=bytes(MAX_BODY_BYTES + 1))
    assert error_of(large, 413)["type"] == "request_too_large"
    for code, status, kind in [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
        (grpc.StatusCode.UNAVAILABLE, 503, "overloaded_error"),
        (grpc.StatusCode.INTERNAL, 500, "api_error"),
    ]:
        fake.error = RpcError(code, "the cause")
        for stream in (False, True):
            error = error_of(await client.post(MESSAGES, json=BODY | {"stream": stream}), status)
            assert error == {"type": kind, "message": "the cause"}


async def test_clients_can_do_without_threads(client: httpx.AsyncClient) -> None:
    response = await client.post(MESSAGES, json=BODY | {"thread": {"type": "create"}})
    assert response.json()["error"].pop("details") == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


async def test_an_error_within_a_stream(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error_at = (2, RpcError(grpc.StatusCode.UNAVAILABLE, "the cause"))
    response = await client.post(MESSAGES, json=BODY | {"stream": True}, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert response.text.endswith(
        'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"the cause"},'
        '"request_id":"mine"}\n\n'
    )


async def test_errors_are_the_clients_exceptions(claude: anthropic.AsyncAnthropic, fake: FakeTokenizer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="missing") as missing:
        await claude.messages.create(**BODY | {"model": "missing"})
    assert missing.value.type == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        await claude.messages.create(**BODY | {"max_tokens": 5000})
    fake.error_at = (2, RpcError(grpc.StatusCode.UNAVAILABLE, "the cause"))
    with pytest.raises(anthropic.APIStatusError, match="the cause") as broken:
        async with claude.messages.stream(**BODY) as stream:
            await stream.until_done()
    assert broken.value.type == "overloaded_error"


async def test_keys(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, api_key="secret") as client:
        await wait_ready(client)
        url = str(client.base_url)
        for credentials in ({"api_key": "secret"}, {"auth_token": "secret"}):
            async with anthropic.AsyncAnthropic(base_url=url, **credentials) as claude:
                assert (await claude.messages.create(**BODY)).content
        # On all routes.
        assert (await client.get("/v1/models", headers={"x-api-key": "secret"})).status_code == 200
        async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as claude:
            with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
                await claude.messages.create(**BODY)


# The document.


async def test_documented(client: httpx.AsyncClient, fake: FakeTokenizer, document: dict[str, Any]) -> None:
    for route, body in [(MESSAGES, BODY), (MESSAGES, {}), (COUNT, {"messages": BODY["messages"]})]:
        response = await client.post(route, json=body)
        check(document, route, "post", response.status_code, "application/json", response.json())
    for route, path in [("/v1/models", "/v1/models"), ("/v1/models/{model}", "/v1/models/fake")]:
        response = await client.get(path, headers={"anthropic-version": "2023-06-01"})
        check(document, route, "get", 200, "application/json", response.json())
    fake.error_at = (6, RpcError(grpc.StatusCode.INTERNAL, "the cause"))
    for num_tokens in (4, 8):
        stream = await client.post(MESSAGES, json=BODY | {"stream": True, "max_tokens": num_tokens})
        for event in stream.text.split("\n\n")[:-1]:
            name, data = event.split("\n")
            value = json.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            check(document, MESSAGES, "post", 200, "text/event-stream", value)
