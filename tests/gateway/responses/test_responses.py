"""The Responses API with the official client: answers, the bytes of streams, conversations, what is refused."""

import json
from collections.abc import Sequence
from typing import Any

import grpc
import httpx
import openai
import pydantic
import pytest

from pagewire.gateway.responses import stored
from pagewire.v1 import common_pb2
from pagewire.v1.common_pb2 import Grammar
from pagewire.v1.inference_pb2 import GenerateResponse, ToolCallDelta
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.core.test_openapi import check
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text, render, token_logprob

RESPONSES = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
WEATHER: Any = [
    {"role": "user", "content": [{"type": "input_text", "text": "Weather in Bern?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "get_weather",
        "arguments": '{"city": "Bern"}',
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
]
STOP = common_pb2.FINISH_REASON_STOP


def said(**fields: Any) -> GenerateResponse:
    return GenerateResponse(**fields)


THINKS_SAYS_CALLS = [
    said(reasoning="Hm"),
    said(reasoning="m."),
    said(text="I "),
    said(text="look."),
    said(tool_calls=[ToolCallDelta(index=0, id="call_a", name="get_weather")]),
    said(tool_calls=[ToolCallDelta(index=0, arguments='{"city":')]),
    said(tool_calls=[ToolCallDelta(index=0, arguments='"Bern"}')]),
    said(finish_reason=common_pb2.FINISH_REASON_TOOL_CALLS, usage=common_pb2.Usage(reasoning_tokens=2)),
]


def events_of(stream: str) -> list[dict[str, Any]]:
    """Every event is named as its data says, and numbered."""
    blocks = stream.removesuffix("\n\n").split("\n\n")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


async def test_a_response_says_what_was_asked_and_answered(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    response = await ai.responses.create(
        model="fake",
        instructions="Be brief.",
        input="hi",
        temperature=0.5,
        max_output_tokens=1000 - 100,
        metadata={"a": "b"},
        extra_body={"seed": 3, "top_k": 5, "stop": ["\0"]},
    )
    text = expected_text("<system>Be brief.<user>hi<assistant>", 3, 900)
    assert response.output_text == text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert message.content[0].annotations == []
    assert (response.instructions, response.temperature, response.metadata) == ("Be brief.", 0.5, {"a": "b"})
    assert (response.top_p, response.tool_choice, response.text.format.type) == (None, "auto", "text")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (36, 900, 936)
    assert usage.input_tokens_details.cached_tokens == 3
    params = fake.received[-1].sampling_params
    assert (params.top_k, params.max_tokens, params.temperature) == (5, 900, 0.5)


async def test_reasoning_text_and_calls_are_items(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    fake.script = THINKS_SAYS_CALLS
    response = await ai.responses.create(model="fake", input="Weather in Bern?", tools=[TOOL])
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Hmm.", [])
    assert (message.type, message.content[0].text) == ("message", "I look.")
    assert (call.type, call.call_id, call.name) == ("function_call", "call_a", "get_weather")
    assert json.loads(call.arguments) == {"city": "Bern"}
    assert (response.status, response.completed_at is not None) == ("completed", True)
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    [tool] = fake.received[-1].chat.tools
    assert (tool.name, json.loads(tool.parameters_json)) == ("get_weather", TOOL["parameters"])

    # The loop goes on with the items as the client has them.
    fake.script = [said(text="Sunny."), said(finish_reason=STOP)]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    question = {"role": "user", "content": "Weather in Bern?"}
    final = await ai.responses.create(model="fake", input=[question, *response.output, output], tools=[TOOL])
    assert final.output_text == "Sunny."
    user, assistant, answered = fake.received[-1].chat.messages
    assert (user.role, assistant.role, answered.role) == ("user", "assistant", "tool")
    assert (assistant.reasoning, assistant.content, assistant.tool_calls[0].id) == ("Hmm.", "I look.", "call_a")
    assert (answered.tool_call_id, answered.content) == ("call_a", "sunny")


async def test_events_are_openais(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """The documented sequence, to the byte."""
    fake.script = THINKS_SAYS_CALLS
    answer = await client.post(RESPONSES, json={"input": "Weather?", "stream": True, "tools": [TOOL]})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    created = events[0]["response"]
    head = created["id"].removeprefix("resp_")
    thought, text, call = f"rs_{head}_0", f"msg_{head}_1", f"fc_{head}_2"

    def delta(kind: str, item: str, index: int, delta: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}.delta", "item_id": item, "output_index": index, **more, "delta": delta}

    def part(when: str, item: str, index: int, part: dict[str, Any]) -> dict[str, Any]:
        place = {"item_id": item, "output_index": index, "content_index": 0}
        return {"type": f"response.content_part.{when}", **place, "part": part}

    def item(when: str, index: int, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": f"response.output_item.{when}", "output_index": index, "item": item}

    def said_text(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def thought_text(text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def reasoning_item(status: str, content: list[Any]) -> dict[str, Any]:
        return {"type": "reasoning", "id": thought, "status": status, "summary": [], "content": content}

    def message_item(status: str, content: list[Any]) -> dict[str, Any]:
        return {"type": "message", "id": text, "status": status, "role": "assistant", "content": content}

    def call_item(status: str, arguments: str) -> dict[str, Any]:
        head = {"type": "function_call", "id": call, "status": status, "call_id": "call_a", "name": "get_weather"}
        return {**head, "arguments": arguments}

    part_0, no_logprobs = {"content_index": 0}, {"logprobs": list[Any]()}
    arguments = '{"city":"Bern"}'
    output = [
        reasoning_item("completed", [thought_text("Hmm.")]),
        message_item("completed", [said_text("I look.")]),
        call_item("completed", arguments),
    ]
    usage = {
        "input_tokens": 25,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 33,
    }
    ended = {"status": "completed", "completed_at": events[-1]["response"]["completed_at"]}
    expected = [
        {"type": "response.created", "response": created},
        {"type": "response.in_progress", "response": created},
        item("added", 0, reasoning_item("in_progress", [])),
        part("added", thought, 0, thought_text("")),
        delta("reasoning_text", thought, 0, "Hm", **part_0),
        delta("reasoning_text", thought, 0, "m.", **part_0),
        {"type": "response.reasoning_text.done", "item_id": thought, "output_index": 0, **part_0, "text": "Hmm."},
        part("done", thought, 0, thought_text("Hmm.")),
        item("done", 0, output[0]),
        item("added", 1, message_item("in_progress", [])),
        part("added", text, 1, said_text("")),
        delta("output_text", text, 1, "I ", **part_0) | no_logprobs,
        delta("output_text", text, 1, "look.", **part_0) | no_logprobs,
        {"type": "response.output_text.done", "item_id": text, "output_index": 1, **part_0, "text": "I look."}
        | no_logprobs,
        part("done", text, 1, said_text("I look.")),
        item("done", 1, output[1]),
        item("added", 2, call_item("in_progress", "")),
        delta("function_call_arguments", call, 2, '{"city":'),
        delta("function_call_arguments", call, 2, '"Bern"}'),
        {
            "type": "response.function_call_arguments.done",
            "item_id": call,
            "output_index": 2,
            "name": "get_weather",
            "arguments": arguments,
        },
        item("done", 2, output[2]),
        {"type": "response.completed", "response": created | ended | {"output": output, "usage": usage}},
    ]
    assert created["status"] == "in_progress"
    assert (created["output"], created["usage"]) == ([], None)
    blocks = [
        f"event: {event['type']}\ndata: {compact(event | {'sequence_number': number})}\n\n"
        for number, event in enumerate(expected)
    ]
    assert answer.text.split("\n\n") == "".join(blocks).split("\n\n")
    # What was streamed is what is kept.
    assert (await client.get(f"{RESPONSES}/{created['id']}")).json() == events[-1]["response"]


async def test_the_document_is_true(client: httpx.AsyncClient, fake: FakeTokenizer, document: dict[str, Any]) -> None:
    fake.script = THINKS_SAYS_CALLS
    body = {"input": WEATHER, "stream": True, "tools": [TOOL], "instructions": "Be brief."}
    events = events_of((await client.post(RESPONSES, json=body)).text)
    for event in events:
        check(document, RESPONSES, "post", 200, "text/event-stream", event)
    route, path = f"{RESPONSES}/{{response_id}}", f"{RESPONSES}/{events[0]['response']['id']}"
    for method, below in [("get", ""), ("get", "/input_items"), ("delete", "")]:
        answer = await client.request(method, path + below)
        check(document, route + below, method, answer.status_code, "application/json", answer.json())


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def test_the_clients_stream_helper(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    fake.script = THINKS_SAYS_CALLS
    async with ai.responses.stream(model="fake", input="Weather?", tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert (final.output_text, final.output[2].arguments) == ("I look.", '{"city":"Bern"}')


async def test_a_pydantic_model_is_parsed(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    class City(pydantic.BaseModel):
        name: str

    fake.script = [said(text='{"name": '), said(text='"Bern"}'), said(finish_reason=STOP)]
    response = await ai.responses.parse(model="fake", input="A city?", text_format=City)
    assert response.output_parsed == City(name="Bern")
    grammar = fake.received[-1].sampling_params.grammar
    assert json.loads(grammar.json_schema)["properties"] == {"name": {"title": "Name", "type": "string"}}


@pytest.mark.parametrize(
    ("text", "grammar"),
    [
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, Grammar(json_schema='{"type": "object"}')),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}}, "verbosity": "medium"},
            Grammar(json_schema='{"type": "null"}'),
        ),
    ],
)
async def test_forms(client: httpx.AsyncClient, fake: FakeTokenizer, text: Any, grammar: Grammar | None) -> None:
    answer = await client.post(RESPONSES, json={"input": "hi", "text": text})
    assert answer.status_code == 200
    params = fake.received[-1].sampling_params
    assert (params.grammar if params.HasField("grammar") else None) == grammar
    assert answer.json()["text"] == {"format": text["format"], "verbosity": "medium"}


async def test_depth_is_no_error_of_the_server(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    parts = '"text": {"format": {"type": "json_schema", "name": "x", "schema": %s}}', '"chat_template_kwargs": %s'
    statuses = set()
    for depth in (300, *range(900, 1000, 3)):
        for part in parts:
            body = '{"input": "Hi", ' + part % (depth * '{"a":' + "1" + depth * "}") + "}"
            answer = await client.post(RESPONSES, content=body, headers={"content-type": "application/json"})
            statuses.add(answer.status_code)
            assert answer.status_code == 200 or "nested too deeply" in answer.json()["error"]["message"]
    assert statuses == {200, 400}


async def test_items_become_messages(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    developer = {"role": "developer", "content": "No jokes."}
    url = "data:image/png;base64,aaaa"
    picture = {
        "role": "user",
        "content": [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": url}],
    }
    body = {"instructions": "Be brief.", "input": [developer, *WEATHER, picture]}
    assert (await client.post(RESPONSES, json=body)).status_code == 200
    system, user, assistant, tool, last = fake.received[-1].chat.messages
    assert (system.role, system.content) == ("system", "Be brief.\n\nNo jokes.")
    assert (user.role, user.content) == ("user", "Weather in Bern?")
    assert (assistant.content, assistant.reasoning) == ("Let me look.", "Ask.")
    assert [(call.id, call.name, call.arguments) for call in assistant.tool_calls] == [
        ("call_1", "get_weather", '{"city": "Bern"}')
    ]
    assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "call_1", "sunny")
    assert [(part.text, part.image.url) for part in last.parts] == [("?", ""), ("", url)]


async def test_a_conversation_goes_on_from_stored_responses(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    first = await ai.responses.create(model="fake", input="one", instructions="Be brief.")
    second = await ai.responses.create(model="fake", input="two", previous_response_id=first.id)
    third = await ai.responses.create(model="fake", input="three", previous_response_id=second.id)
    said_before = f"<user>one<assistant>{first.output_text}<user>two<assistant>{second.output_text}"
    assert render(fake.received[-1].chat) == f"{said_before}<user>three<assistant>"  # instructions are not carried over
    assert third.previous_response_id == second.id

    await ai.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=first.id) as raised:
        await ai.responses.create(model="fake", input="four", previous_response_id=third.id)
    assert (raised.value.param, raised.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_what_is_not_stored_cannot_be_continued_from(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    response = await ai.responses.create(model="fake", input="one", store=False)
    assert response.store is False
    with pytest.raises(openai.BadRequestError, match="store: false"):
        await ai.responses.create(model="fake", input="two", previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError, match="store: false"):
        await ai.responses.retrieve(response.id)


async def test_another_gateway_has_the_same_responses(
    ai: openai.AsyncOpenAI, fake: FakeTokenizer, address: str
) -> None:
    response = await ai.responses.create(model="fake", input="one")
    async with running_gateway(address) as other:
        await wait_ready(other)
        assert (await other.get(f"{RESPONSES}/{response.id}")).json()["output"][0]["id"] == response.output[0].id
        assert (await other.delete(f"{RESPONSES}/{response.id}")).json()["deleted"] is True
    with pytest.raises(openai.NotFoundError, match="deleted"):
        await ai.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        await ai.responses.delete(response.id)


async def test_responses_expire_and_make_room(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, response_store_ttl=0.001, max_stored_responses=2) as client:
        await wait_ready(client)
        id = (await client.post(RESPONSES, json={"input": "one"})).json()["id"]
        answer = await client.get(f"{RESPONSES}/{id}")
        assert (answer.status_code, "kept for 0.001 seconds" in answer.text) == (404, True)
    async with running_gateway(address, max_stored_responses=2) as client:
        await wait_ready(client)
        ids = [(await client.post(RESPONSES, json={"input": "one"})).json()["id"] for _ in range(3)]
        assert [(await client.get(f"{RESPONSES}/{id}")).status_code for id in ids] == [404, 200, 200]


async def test_input_items_are_listed_in_pages(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    response = await ai.responses.create(model="fake", input=[{"role": "user", "content": "hi"}, *WEATHER])
    items = [item async for item in await ai.responses.input_items.list(response.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message", "message", *(item["type"] for item in WEATHER[1:])]
    assert (items[0].content[0].type, items[0].content[0].text) == ("input_text", "hi")
    assert all(item.id for item in items)
    newest = await ai.responses.input_items.list(response.id, limit=1)
    assert ([item.id for item in newest.data], newest.has_more) == ([items[-1].id], True)
    with pytest.raises(openai.NotFoundError, match="missing"):
        await ai.responses.input_items.list(response.id, after="missing")


async def test_items_may_be_named_instead_of_repeated(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    first = await ai.responses.create(model="fake", input="one")
    [asked] = (await ai.responses.input_items.list(first.id)).data
    references: Any = [{"type": "item_reference", "id": asked.id}, {"id": first.output[0].id}]
    await ai.responses.create(model="fake", input=[*references, {"role": "user", "content": "two"}])
    assert render(fake.received[-1].chat) == f"<user>one<assistant>{first.output_text}<user>two<assistant>"


async def test_the_items_that_an_input_names_are_bounded_together(
    ai: openai.AsyncOpenAI, fake: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.max_model_len = 100_000
    first = await ai.responses.create(model="fake", input="one" * 200)
    [asked] = (await ai.responses.input_items.list(first.id)).data
    monkeypatch.setattr(stored, "MAX_CHAIN_BYTES", 20_000)
    references: Any = [{"type": "item_reference", "id": asked.id}]
    await ai.responses.create(model="fake", input=references * 10, store=False)
    with pytest.raises(openai.BadRequestError, match="the items that input names have more than 20000 bytes"):
        await ai.responses.create(model="fake", input=references * 100, store=False)


async def test_the_items_of_a_conversation_are_bounded_together(
    ai: openai.AsyncOpenAI, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_CHAIN_ITEMS", 100)
    empty = [{"type": "reasoning", "id": f"rs_{i}", "summary": []} for i in range(60)]
    first = await ai.responses.create(model="fake", input=[*empty, {"role": "user", "content": "one"}])  # type: ignore[list-item]
    [asked] = (await ai.responses.input_items.list(first.id, limit=1)).data
    second = await client.post(RESPONSES, json={"input": "two", "previous_response_id": first.id})
    third = await client.post(
        RESPONSES,
        json={"input": [*empty, {"role": "user", "content": "x"}], "previous_response_id": second.json()["id"]},
    )
    assert (second.status_code, third.status_code) == (200, 200)
    refused = await client.post(RESPONSES, json={"input": "four", "previous_response_id": third.json()["id"]})
    assert refused.status_code == 400 and "100 items" in refused.json()["error"]["message"]
    monkeypatch.setattr(stored, "MAX_CHAIN_ITEMS", 50)
    with pytest.raises(openai.BadRequestError, match="50 items; name items of fewer responses"):
        await ai.responses.create(model="fake", input=[{"type": "item_reference", "id": asked.id}])


async def test_thoughts_instructions_and_calls_are_collected(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    def item(**fields: Any) -> dict[str, Any]:
        return fields

    thoughts = [
        item(type="reasoning", id=f"rs_{i}", summary=[{"type": "summary_text", "text": f"{i}."}]) for i in range(5)
    ]
    calls = [item(type="function_call", call_id=f"c{i}", name="f", arguments="{}") for i in range(5)]
    systems = [item(role="system", content=f"s{i}") for i in range(5)]
    body = {"instructions": "Be brief.", "input": [*systems, item(role="user", content="u"), *thoughts, *calls]}
    answer = await client.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    system, _, assistant = fake.received[-1].chat.messages
    assert system.content == "\n\n".join(["Be brief.", *(f"s{i}" for i in range(5))])
    assert assistant.reasoning == "0.1.2.3.4." and [call.id for call in assistant.tool_calls] == [
        f"c{i}" for i in range(5)
    ]


async def test_the_prompt_is_counted_beforehand(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    first = await ai.responses.create(model="fake", input="one")
    count = await ai.responses.input_tokens.count(model="fake", input="two", previous_response_id=first.id)
    asked = f"<user>one<assistant>{first.output_text}<user>two<assistant>"
    assert (count.object, count.input_tokens) == ("response.input_tokens", len("^" + asked))
    assert len(fake.received) == 1


async def test_the_tools_that_must_be_called_are_counted(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    body = {"model": "fake", "input": "hi", "tools": [tool], "tool_choice": "required"}
    assert (await client.post("/v1/responses/input_tokens", json=body)).status_code == 200
    assert fake.tokenized[-1].output_parsing.required


async def test_asking_for_more_than_there_is_changes_nothing(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    response = await ai.responses.create(model="fake", input="one", include=["reasoning.encrypted_content"])
    again = await ai.responses.retrieve(response.id, include=["reasoning.encrypted_content"], include_obfuscation=False)
    assert again.output_text == response.output_text
    items = await ai.responses.input_items.list(response.id, include=["message.input_image.image_url"])
    assert len(items.data) == 1


async def test_a_turn_that_was_only_thought(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    answer = await client.post(RESPONSES, json={"input": [WEATHER[0], WEATHER[1], WEATHER[0]]})
    assert answer.status_code == 200
    thought = fake.received[-1].chat.messages[1]
    assert (thought.reasoning, thought.HasField("content"), thought.content) == ("Ask.", True, "")


@pytest.mark.parametrize(
    ("choice", "shown", "forced"),
    [
        ("none", [], None),
        ("auto", ["get_weather", "now"], None),
        ("required", ["get_weather", "now"], "required"),
        ({"type": "function", "name": "now"}, ["get_weather", "now"], "named"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            ["now"],
            "required",
        ),
    ],
)
async def test_choices_among_tools(
    client: httpx.AsyncClient, fake: FakeTokenizer, choice: Any, shown: list[str], forced: str | None
) -> None:
    body = {"input": "hi", "tools": [TOOL, {"type": "function", "name": "now"}], "tool_choice": choice}
    answer = await client.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tool_choice"] == choice
    request = fake.received[-1]
    assert [tool.name for tool in request.chat.tools] == shown
    assert request.output_parsing.WhichOneof("forced") == forced


async def test_logprobs_are_those_of_the_text(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    def tokens(text: str) -> Sequence[Any]:
        return [token_logprob(char, 1) for char in text]

    fake.script = [
        said(reasoning="H", logprobs=tokens("H")),
        said(logprobs=tokens("|")),  # a mark
        said(text="é", logprobs=tokens("é")),
        said(logprobs=tokens("a")),  # held back
        said(text="ab", logprobs=tokens("b")),
        said(finish_reason=STOP),
    ]
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = (await client.post(RESPONSES, json=body)).json()
    events = events_of((await client.post(RESPONSES, json=body | {"stream": True})).text)
    for response in (whole, events[-1]["response"]):
        logprobs = response["output"][1]["content"][0]["logprobs"]
        assert [one["token"] for one in logprobs] == ["é", "a", "b"]
        assert logprobs[0]["top_logprobs"][0]["token"] == "a"
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in delta] for delta in deltas] == [["é"], ["a", "b"]]


async def test_a_stream_that_fails_says_so(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error_at = (4, RpcError(grpc.StatusCode.INTERNAL, "broken"))
    events = events_of((await client.post(RESPONSES, json={"input": "hi", "stream": True})).text)
    *_, item, error, failed = events
    assert (item["type"], item["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (error["type"], error["code"], error["message"]) == ("error", "server_error", "broken")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "broken"}

    fake.error_at = (0, RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    answer = await client.post(RESPONSES, json={"input": "hi", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_too_long_a_conversation_is_shortened_if_the_client_says_so(
    ai: openai.AsyncOpenAI, fake: FakeTokenizer
) -> None:
    turns: Any = []
    for turn in ("one", "two", "three"):
        turns += [{"role": "user", "content": turn * 60}, {"role": "assistant", "content": "ok"}]
    question: Any = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "four"}]
    fake.max_model_len = 400
    with pytest.raises(openai.BadRequestError, match="400"):
        await ai.responses.create(model="fake", input=question)
    response = await ai.responses.create(model="fake", input=question, truncation="auto", max_output_tokens=24)
    assert render(fake.received[-1].chat) == f"<system>Be brief.<user>{'three' * 60}<assistant>ok<user>four<assistant>"
    assert response.truncation == "auto"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "input_file"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "string"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role", "developer"),
        ({"input": [WEATHER[-1]]}, "input", "'call_1'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "'msg_1'"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content", ""),
        ({}, "input", "give input"),
        ({"input": "a", "conversation": "c"}, "conversation", "previous_response_id"),
        ({"input": "a", "max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"input": "a", "inptu": 5}, "inptu", "input"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
            "'x'",
        ),
        ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"input": "a", "reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs", "include"),
        ({"input": "a", "stream_options": {}}, "stream_options", "stream: true"),
        ({"input": "a", "background": True, "store": False}, "background", "store"),
        ({"input": "a", "temperature": -1}, "temperature", "greater"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, body: Any, param: str, words: str) -> None:
    answer = await client.post(RESPONSES, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_items_without_content_or_with_cut_arguments(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    items = [
        {"role": "user", "content": "hi", "channel": None},
        {"type": "message", "role": "assistant", "content": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a'},
        {"type": "function_call_output", "call_id": "c", "output": None},
    ]
    answer = await client.post(RESPONSES, json={"input": items})
    assert answer.status_code == 200, answer.text
    assert [turn.role for turn in fake.received[-1].chat.messages] == ["user", "assistant", "tool"]
