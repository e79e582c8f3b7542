"""`functions`, as clients called them before there were tools: answered in their own form."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.chat.test_tools import ARGUMENTS, CALL, PARAMETERS, QUESTION, SECOND, ai  # noqa: F401 (a fixture)
from tests.gateway.conftest import Model
from tests.gateway.core.test_openapi import check

CHAT = "/v1/chat/completions"
WEATHER: Any = {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}
NOW: Any = {"name": "now"}


async def test_the_whole_loop(ai: openai.AsyncOpenAI, model: Model) -> None:  # noqa: F811
    model.output = f"I look.\n{CALL}\n{SECOND}"
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, functions=[WEATHER, NOW])
    [choice] = answer.choices
    message = choice.message
    assert (choice.finish_reason, message.content, message.tool_calls) == ("function_call", "I look.", None)
    assert (message.function_call.name, message.function_call.arguments) == ("get_weather", ARGUMENTS)
    for function in (WEATHER, NOW):
        assert json.dumps({"type": "function", "function": function}) in model.prompt

    reply: Any = {"role": "function", "name": "get_weather", "content": "grey"}
    model.output = "It is grey."
    answer = await ai.chat.completions.create(model="m", messages=[*QUESTION, message, reply], functions=[WEATHER])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is grey.", "stop")
    assert answer.choices[0].message.function_call is None
    assert f"I look.\n{CALL}" in model.prompt and "<tool_response>\ngrey\n</tool_response>" in model.prompt


async def test_a_call_is_streamed(ai: openai.AsyncOpenAI, model: Model) -> None:  # noqa: F811
    model.output = CALL
    stream = await ai.chat.completions.create(model="m", messages=QUESTION, functions=[WEATHER], stream=True)
    choices = [choice async for chunk in stream for choice in chunk.choices]
    calls = [choice.delta.function_call for choice in choices if choice.delta.function_call]
    assert [call.name for call in calls] == ["get_weather"] + [None] * (len(calls) - 1)
    assert "".join(call.arguments for call in calls) == ARGUMENTS
    assert choices[-1].finish_reason == "function_call"
    assert not any(choice.delta.tool_calls for choice in choices)


@pytest.mark.parametrize("choice", [{"name": "get_weather"}, "none"])
async def test_which_function_is_called(ai: openai.AsyncOpenAI, model: Model, choice: Any) -> None:  # noqa: F811
    model.output = ARGUMENTS
    answer = await ai.chat.completions.create(
        model="m", messages=QUESTION, functions=[WEATHER, NOW], function_call=choice
    )
    call = answer.choices[0].message.function_call
    if choice == "none":
        assert call is None and "get_weather" not in model.prompt
    else:
        assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
        assert model.scheduler.requests[-1].sampling_params.HasField("grammar")


async def test_the_answer_is_as_documented(http: httpx.AsyncClient, model: Model, document: dict[str, Any]) -> None:
    model.output = CALL
    body = {"messages": QUESTION, "functions": [WEATHER]}
    answer = await http.post(CHAT, json=body)
    check(document, CHAT, "post", 200, "application/json", answer.json())
    streamed = await http.post(CHAT, json=body | {"stream": True})
    *events, done = [event.removeprefix("data: ") for event in streamed.text.split("\n\n") if event]
    assert done == "[DONE]"
    for event in events:
        check(document, CHAT, "post", 200, "text/event-stream", json.loads(event))
