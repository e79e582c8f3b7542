"""Tools, thinking and forms as Anthropic's official client has them: the gateway, a real tokenizer service, scripted
tokens."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest

from tests.gateway.conftest import Model, anthropic_client

PARAMETERS = {"type": "object", "properties": {"zip": {"type": "integer"}, "city": {"type": "string"}}}
WEATHER: Any = {"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS}
NOW: Any = {"name": "now", "input_schema": {"type": "object"}}
QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]
ARGUMENTS = '{"zip": 8001, "city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nWhere? Zürich.\n</think>\n\n"
BODY: Any = {"model": "m", "max_tokens": 500, "messages": QUESTION, "tools": [WEATHER, NOW]}


@pytest.fixture
async def claude(http: httpx.AsyncClient) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(http) as official:
        yield official


def joined(stream: str) -> list[Any]:
    """Returns the events, with deltas of one kind joined, as their sizes are not specified."""
    result: list[Any] = []
    for text in stream.split("\n\n")[:-1]:
        event = json.loads(text.partition("\ndata: ")[2])
        last = result[-1] if result else {}
        if event["type"] == last.get("type") == "content_block_delta":
            kind, piece = event["delta"].items()
            if kind == ("type", last["delta"]["type"]):
                last["delta"][piece[0]] += piece[1]
                continue
        result.append(event)
    return result


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[Any]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


async def test_the_events_are_the_documented_ones(http: httpx.AsyncClient, model: Model) -> None:
    model.output = f"{THOUGHT}I look.\n{CALL}\n{SECOND}"
    response = await http.post("/v1/messages", json=BODY | {"stream": True})
    first, *events, delta, stop = joined(response.text)
    message, counts = first["message"], delta.pop("usage")
    assert (first["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    assert delta == {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}}
    assert counts["output_tokens"] > counts["output_tokens_details"]["thinking_tokens"] > 0
    assert stop == {"type": "message_stop"}
    assert events.pop(1) == {"type": "ping"}
    ids = [event["content_block"].get("id") for event in events if event["type"] == "content_block_start"]
    assert len({*ids}) == 3  # none, and those of the calls
    assert events == [
        *block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "Where? Zürich."},
            {"type": "signature_delta", "signature": "unsigned"},
        ),
        *block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "I look."}),
        *block(
            2,
            {"type": "tool_use", "id": ids[2], "name": "get_weather", "input": {}},
            {"type": "input_json_delta", "partial_json": ARGUMENTS},
        ),
        *block(
            3,
            {"type": "tool_use", "id": ids[3], "name": "now", "input": {}},
            {"type": "input_json_delta", "partial_json": "{}"},
        ),
    ]


async def test_the_whole_loop(claude: anthropic.AsyncAnthropic, model: Model) -> None:
    model.output = f"{THOUGHT}I look.\n{CALL}\n{SECOND}"
    answer = await claude.messages.create(**BODY)
    async with claude.messages.stream(**BODY) as stream:
        streamed = await stream.get_final_message()
    assert answer.stop_reason == streamed.stop_reason == "tool_use"
    thinking, text, *calls = answer.content
    assert (thinking.thinking, text.text) == ("Where? Zürich.", "I look.")
    assert [(call.name, call.input) for call in calls] == [("get_weather", json.loads(ARGUMENTS)), ("now", {})]
    reported = [[block.model_dump(exclude={"id"}) for block in message.content] for message in (answer, streamed)]
    assert reported[0] == [
        {name: value for name, value in one.items() if name != "parsed_output"} for one in reported[1]
    ]

    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "grey"} for call in calls]
    model.output = "It is grey."
    history = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    answer = await claude.messages.create(**BODY | {"messages": history})
    assert ([block.text for block in answer.content], answer.stop_reason) == (["It is grey."], "end_turn")
    said = f"<|im_start|>assistant\n<think>\nWhere? Zürich.\n</think>\n\nI look.\n{CALL}\n{SECOND}<|im_end|>"
    assert said in model.prompt
    assert model.prompt.count("<tool_response>\ngrey\n</tool_response>") == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner(claude: anthropic.AsyncAnthropic, model: Model, stream: bool) -> None:
    @anthropic.beta_async_tool
    async def get_weather(zip: int, city: str) -> str:
        """Weather."""
        model.output = f"It is grey in {city}, {zip}."
        return "grey"

    model.output = CALL
    runner = claude.beta.messages.tool_runner(
        model="m", max_tokens=500, messages=QUESTION, tools=[get_weather], stream=stream
    )
    last = await runner.until_done()
    assert last.content[0].text == "It is grey in Zürich, 8001."
    assert "<tool_response>\ngrey\n</tool_response>" in model.prompt


async def test_a_tool_that_must_be_called(claude: anthropic.AsyncAnthropic, model: Model) -> None:
    model.output = ARGUMENTS
    answer = await claude.messages.create(**BODY | {"tool_choice": {"type": "tool", "name": "get_weather"}})
    assert answer.stop_reason == "tool_use"
    assert [(call.name, call.input) for call in answer.content] == [("get_weather", json.loads(ARGUMENTS))]


async def test_a_call_without_arguments_has_an_empty_input(claude: anthropic.AsyncAnthropic, model: Model) -> None:
    model.output = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    now = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}
    body = BODY | {"tools": [now]}
    answer = await claude.messages.create(**body)
    async with claude.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    for message in (answer, streamed):
        assert message.stop_reason == "tool_use"
        assert [(block.type, block.name, block.input) for block in message.content] == [("tool_use", "now", {})]
    [call] = answer.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    history = [*QUESTION, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    model.output = "It is noon."
    last = await claude.messages.create(**body | {"messages": history})
    assert last.content[0].text == "It is noon."
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in model.prompt


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"zip": 8001, "city": "Zü', {"zip": 8001}),
        ("{", {}),
        ('{"zip": 12345678901234567890123}', {"zip": 12345678901234567890123}),
    ],
)
async def test_the_input_of_a_call_that_is_cut_off(
    claude: anthropic.AsyncAnthropic, model: Model, arguments: str, read: Any
) -> None:
    """The input is what the official client reads from a stream that ends there."""
    model.output = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}'
    num_tokens = len(model.encode(model.output))
    answer = await claude.messages.create(**BODY | {"max_tokens": num_tokens})
    async with claude.messages.stream(**BODY | {"max_tokens": num_tokens}) as stream:
        streamed = await stream.get_final_message()
    for message in (answer, streamed):
        assert message.stop_reason == "max_tokens"
        assert [block.input for block in message.content] == [read]


async def test_input_that_is_no_json_is_reported(claude: anthropic.AsyncAnthropic, model: Model) -> None:
    model.output = '<tool_call>\n{"name": "get_weather", "arguments": {"zip": four}}\n</tool_call>'
    answer = await claude.messages.create(**BODY)
    assert [block.input for block in answer.content] == [{"INVALID_JSON": '{"zip": four}'}]


async def test_thoughts_may_be_left_out(claude: anthropic.AsyncAnthropic, model: Model) -> None:
    model.output = f"{THOUGHT}Grey."
    body = BODY | {"thinking": {"type": "adaptive", "display": "omitted"}}
    answer = await claude.messages.create(**body)
    async with claude.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    for message in (answer, streamed):
        thinking, text = message.content
        assert (thinking.thinking, thinking.signature, text.text) == ("", "unsigned", "Grey.")


async def test_thinking_can_be_turned_off(claude: anthropic.AsyncAnthropic, model: Model) -> None:
    model.output = "Grey."
    await claude.messages.create(**BODY | {"thinking": {"type": "disabled"}})
    assert model.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    await claude.messages.create(**BODY | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert model.prompt.endswith("<|im_start|>assistant\n")


async def test_an_answer_goes_on_with_the_last_message(claude: anthropic.AsyncAnthropic, model: Model) -> None:
    model.output = "grey."
    begun = [*QUESTION, {"role": "assistant", "content": "It is "}]
    answer = await claude.messages.create(**BODY | {"messages": begun})
    assert answer.content[0].text == "grey." and model.prompt.endswith("<|im_start|>assistant\nIt is ")


async def test_parse(claude: anthropic.AsyncAnthropic, model: Model) -> None:
    class Weather(pydantic.BaseModel):
        sky: str

    model.output = '{"sky": "grey"}'
    for messages in (claude.messages, claude.beta.messages):
        answer = await messages.parse(model="m", max_tokens=500, messages=QUESTION, output_format=Weather)
        assert answer.parsed_output == Weather(sky="grey")
    schema = json.loads(model.scheduler.requests[-1].sampling_params.grammar.json_schema)
    assert schema["properties"]["sky"]["type"] == "string"
