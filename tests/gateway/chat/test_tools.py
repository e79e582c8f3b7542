"""Tools and reasoning from end to end: the official client, the gateway, a real tokenizer service, scripted tokens."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.v1.scheduler_pb2 import TokenRequest
from tests.gateway.conftest import Model, openai_client, running_gateway, wait_ready
from tests.gateway.core.test_openapi import check
from tests.gateway.generation import test_documented_streams as documented_streams
from tests.services.tokenizer.service_line import EOS, TokenizerLine

PARAMETERS = {"type": "object", "properties": {"zip": {"type": "integer"}, "city": {"type": "string"}}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS},
}
STRICT: Any = {"type": "function", "function": TOOL["function"] | {"strict": True}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]
ARGUMENTS = '{"zip": 8001, "city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nWhere? Zürich.\n</think>\n\n"


@pytest.fixture
async def ai(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(http) as official:
        yield official


async def streamed(ai: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    """The choices of all chunks."""
    stream = await ai.chat.completions.create(model="m", messages=QUESTION, stream=True, **options)
    return [choice async for chunk in stream for choice in chunk.choices]


async def test_the_whole_loop(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = f"{THOUGHT}I look.\n{CALL}\n{SECOND}"
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL, NOW])
    [choice] = answer.choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "I look.")
    assert message.model_extra == {"reasoning": "Where? Zürich.", "reasoning_content": "Where? Zürich."}
    assert [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("function", "get_weather", ARGUMENTS),
        ("function", "now", "{}"),
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    shown = [{"type": "function", "function": tool["function"]} for tool in (TOOL, NOW)]
    assert all(json.dumps(tool) in model.prompt for tool in shown)

    answers = [{"role": "tool", "tool_call_id": call.id, "content": "grey"} for call in message.tool_calls]
    model.output = "It is grey."
    answer = await ai.chat.completions.create(model="m", messages=[*QUESTION, message, *answers], tools=[TOOL, NOW])
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("It is grey.", None)
    assert answer.choices[0].finish_reason == "stop"
    assert (
        f"<|im_start|>assistant\n<think>\nWhere? Zürich.\n</think>\n\nI look.\n{CALL}\n{SECOND}<|im_end|>"
        in model.prompt
    )
    assert model.prompt.count("<tool_response>\ngrey\n</tool_response>") == 2


async def test_usage_counts_the_reasoning(ai: openai.AsyncOpenAI, model: Model, smollm2: LoadedTokenizer) -> None:
    """The usage covers all choices, whole and streamed."""
    model.output = f"{THOUGHT}Grey."
    whole, opening, answer = (
        len(smollm2.encode(text, add_special_tokens=False)) for text in (model.output, "<think>", ">\n\nGrey.")
    )
    expected = whole - opening - answer  # this model's mark is several tokens, of which the last one ends the reasoning
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, n=2)
    stream = await ai.chat.completions.create(
        model="m", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in stream]
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * expected
    assert last.usage.completion_tokens_details.reasoning_tokens == expected


async def test_chunks_are_openais(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = f"{THOUGHT}I look.\n{CALL}\n{SECOND}"
    role, *deltas, finish = await streamed(ai, tools=[TOOL, NOW])
    assert role.delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
    assert (finish.delta.model_dump(exclude_unset=True), finish.finish_reason) == ({}, "tool_calls")
    assert all(choice.finish_reason is None for choice in deltas)
    kinds = [next(iter(choice.delta.model_dump(exclude_unset=True))) for choice in deltas]
    assert kinds == sorted(kinds, key=["reasoning", "content", "tool_calls"].index)
    assert "".join(choice.delta.reasoning for choice in deltas if choice.delta.model_extra) == "Where? Zürich."
    assert "".join(choice.delta.content or "" for choice in deltas) == "I look."
    pieces = [call.model_dump(exclude_unset=True) for choice in deltas for call in choice.delta.tool_calls or ()]
    heads = [piece for piece in pieces if "id" in piece]
    assert [(head["index"], head["type"], head["function"]) for head in heads] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    bodies = [piece for piece in pieces if "id" not in piece]
    assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in bodies)
    written = ["".join(p["function"]["arguments"] for p in bodies if p["index"] == index) for index in (0, 1)]
    assert written == [ARGUMENTS, "{}"]


@pytest.mark.parametrize(("name", "num_calls"), [("chat, a tool", 1), ("chat, two tools", 2)])
async def test_streams_are_those_that_are_documented(
    http: httpx.AsyncClient, model: Model, name: str, num_calls: int
) -> None:
    calls = ['{"name": "get_weather", "arguments": {"location":"Paris"}}', '{"name": "get_time", "arguments": {}}']
    model.output = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls[:num_calls])
    tools = [{"type": "function", "function": {"name": tool}} for tool in ("get_weather", "get_time")]
    documented_streams.check(name, await documented_streams.stream_of(http, messages=QUESTION, tools=tools))


async def test_arguments_are_sent_before_the_call_ends(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output, model.scheduler.auto = CALL, False
    arguments = ""

    async def read() -> None:
        nonlocal arguments
        stream = await ai.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL], stream=True)
        async for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or ():
                arguments += call.function.arguments

    reader = asyncio.create_task(read())
    await model.scheduler.until(lambda: model.scheduler.num_running == 1)
    while len(arguments) < 5:
        assert model.scheduler.num_running == 1
        model.scheduler.step()
        await asyncio.sleep(0.02)
    assert ARGUMENTS.startswith(arguments)
    model.scheduler.auto = True
    model.scheduler.step()
    await reader
    assert arguments == ARGUMENTS


async def test_one_call_at_most_on_request(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = f"{CALL}\n{SECOND}"
    answer = await ai.chat.completions.create(
        model="m", messages=QUESTION, tools=[TOOL, NOW], parallel_tool_calls=False
    )
    message = answer.choices[0].message
    assert ([call.function.name for call in message.tool_calls], message.content) == (["get_weather"], None)
    choices = await streamed(ai, tools=[TOOL, NOW], parallel_tool_calls=False)
    assert {call.index for choice in choices for call in choice.delta.tool_calls or ()} == {0}


@pytest.fixture(scope="module")
def compiler(smollm2_gguf: Path) -> Compiler:
    return Compiler(smollm2_gguf, 49152, [EOS])


def admits(compiler: Compiler, model: Model, output: str) -> bool:
    """Returns whether the grammar of the last request admits an output."""
    matcher = compiler.compile(model.scheduler.requests[-1].sampling_params.grammar)
    token_ids = model.encode(output)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


async def test_a_call_may_be_required(ai: openai.AsyncOpenAI, model: Model, compiler: Compiler) -> None:
    model.output = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'
    # Two definitions of one name.
    referring: Any = [{"type": "function", "function": {"name": f"refer_{kind}", "strict": True, "parameters": {
        "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": kind}}}}}
        for kind in ("integer", "string")]  # fmt: skip
    options: Any = {"tools": [TOOL, NOW, *referring], "tool_choice": "required"}
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, **options)
    message = answer.choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("get_weather", ARGUMENTS), ("now", "{}"),
    ]  # fmt: skip
    assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    for output, admitted in (
        (model.output, True),
        ('[{"name": "refer_integer", "arguments": {"x": 1}}, {"name": "refer_string", "arguments": {"x":"1"}}]', True),
        ('[{"name": "refer_integer", "arguments": {"x": "1"}}]', False),
        ('[{"name": "other", "arguments": {}}]', False),
        ('[{"name": "now", "arguments": {"x": 1}}]', False),
        ("[]", False),
        ("I look.", False),
    ):
        assert admits(compiler, model, output) == admitted, output
    choices = await streamed(ai, **options)
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert "".join(call.function.arguments for call in calls) == ARGUMENTS + "{}"

    await ai.chat.completions.create(model="m", messages=QUESTION, parallel_tool_calls=False, **options)
    assert not admits(compiler, model, model.output)


async def test_a_strict_tool_may_be_called_or_not(ai: openai.AsyncOpenAI, model: Model, compiler: Compiler) -> None:
    model.output = f"{THOUGHT}I look.\n{CALL}\n{SECOND}"
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, tools=[STRICT, NOW])
    calls = [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls or ()]
    assert calls == [("get_weather", ARGUMENTS), ("now", "{}")]
    wrong = CALL.replace("8001", '"8001"')
    said = f"I look.\n{CALL}\n{SECOND}"  # behind the reasoning
    for output, admitted in (
        (said, True),
        ("Grey.", True),
        (THOUGHT, False),
        (wrong, False),
        (f"Well. {wrong}", False),
    ):
        assert admits(compiler, model, output) == admitted, output
    await ai.chat.completions.create(model="m", messages=QUESTION, tools=[STRICT, NOW], parallel_tool_calls=False)
    assert admits(compiler, model, CALL) and not admits(compiler, model, f"{CALL}\n{SECOND}")
    await ai.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL, NOW])
    assert not model.scheduler.requests[-1].sampling_params.HasField("grammar")


FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"guided_json": {"type": "object"}},
    {"guided_regex": r"\{\}"},
    {"guided_choice": ["{}"]},
    {"guided_grammar": 'root ::= "{}"'},
    {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": " ?"}},
    {"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
async def test_the_form_of_an_answer_beside_tools(
    ai: openai.AsyncOpenAI, model: Model, compiler: Compiler, form: dict[str, Any]
) -> None:
    """The answer has it; a call is none."""
    model.output = CALL
    asked: Any = {"model": "m", "messages": QUESTION, "tools": [TOOL], "extra_body": form}
    answer = await ai.chat.completions.create(**asked)
    assert answer.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS
    for output, admitted in (("{}", True), (CALL, True), ("Grey.", False), (f"Well. {CALL}", False)):
        assert admits(compiler, model, output) == admitted, output
    model.output = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    answer = await ai.chat.completions.create(**asked, tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS
    assert admits(compiler, model, model.output) and not admits(compiler, model, "{}")


async def test_some_tools_may_be_allowed(ai: openai.AsyncOpenAI, model: Model, compiler: Compiler) -> None:
    model.output = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    for mode in ("required", "auto"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        answer = await ai.chat.completions.create(
            model="m", messages=QUESTION, tools=[TOOL, NOW], tool_choice=choice, parallel_tool_calls=True
        )
        assert bool(answer.choices[0].message.tool_calls) == (mode == "required")
        assert '"get_weather"' in model.prompt and '"now"' not in model.prompt
        if mode == "required":
            assert admits(compiler, model, model.output)
            assert not admits(compiler, model, '[{"name": "now", "arguments": {}}]')


async def test_the_official_clients_helpers(ai: openai.AsyncOpenAI, model: Model) -> None:
    class GetWeather(pydantic.BaseModel):
        zip: int
        city: str

    model.output = f'[{{"name": "GetWeather", "arguments": {ARGUMENTS}}}]'
    asked: Any = {"model": "m", "messages": QUESTION, "tool_choice": "required"}
    tools = [openai.pydantic_function_tool(GetWeather)]
    expected = GetWeather(zip=8001, city="Zürich")
    parsed = await ai.chat.completions.parse(tools=tools, **asked)
    [call] = parsed.choices[0].message.tool_calls
    assert call.function.parsed_arguments == expected
    # What it has made of an answer goes back with it.
    turns = [*QUESTION, parsed.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "grey"}]
    await ai.chat.completions.parse(tools=tools, **asked | {"messages": turns})
    async with ai.chat.completions.stream(tools=tools, **asked) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [expected]


async def test_a_tool_may_be_named(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = ARGUMENTS
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, tools=[NOW, TOOL], tool_choice=named)
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "stop")
    assert json.loads(model.scheduler.requests[-1].sampling_params.grammar.json_schema) == PARAMETERS


@pytest.mark.parametrize("options", [{"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {}])
async def test_without_tools_all_is_text(ai: openai.AsyncOpenAI, model: Model, options: dict[str, Any]) -> None:
    model.output = CALL
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, **options)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
    assert "get_weather" not in model.prompt


async def test_what_is_no_call_is_text(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = '<tool_call>\n{"name": "get_weather"'
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (model.output, "stop")


async def test_choices_have_calls_of_their_own(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = CALL
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL], n=2)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 2
    choices = await streamed(ai, tools=[TOOL], n=2)
    for index in (0, 1):
        of_choice = [call for c in choices if c.index == index for call in c.delta.tool_calls or ()]
        assert "".join(call.function.arguments for call in of_choice) == ARGUMENTS


async def test_reasoning_is_left_out_on_request(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = f"{THOUGHT}Grey."
    body = {"include_reasoning": False}
    answer = await ai.chat.completions.create(model="m", messages=QUESTION, extra_body=body)
    assert answer.choices[0].message.content == "Grey." and not answer.choices[0].message.model_extra
    deltas = (await streamed(ai, extra_body=body))[1:-1]
    assert "".join(choice.delta.content for choice in deltas) == "Grey."
    assert all(choice.delta.content for choice in deltas)


async def test_effort_documents_and_older_names_reach_the_template(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = "Grey."
    turns = [*QUESTION, {"role": "assistant", "content": "Grey.", "reasoning_content": "Hm."}, *QUESTION]
    await ai.chat.completions.create(model="m", messages=turns, reasoning_effort="none")
    assert "<think>\nHm.\n</think>\n\nGrey.<|im_end|>" in model.prompt
    assert model.prompt.endswith("<think>\n\n</think>\n\n")
    # What follows a message that is begun is its text.
    model.output = "<think>"
    continued = {"continue_final_message": True}
    answer = await ai.chat.completions.create(model="m", messages=turns[:2], extra_body=continued)
    assert answer.choices[0].message.content == "<think>"


async def test_tokenize_sees_tools_as_a_completion_does(
    http: httpx.AsyncClient, ai: openai.AsyncOpenAI, model: Model
) -> None:
    await ai.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL])
    tokens = (await http.post("/tokenize", json={"messages": QUESTION, "tools": [TOOL]})).json()["tokens"]
    assert tokens == list(model.scheduler.requests[-1].prompt_token_ids)


async def test_a_thinking_budget(ai: openai.AsyncOpenAI, model: Model) -> None:
    model.output = f"{THOUGHT}Grey."
    for budget in (5, -1):
        await ai.chat.completions.create(model="m", messages=QUESTION, extra_body={"thinking_token_budget": budget})
    limited, unlimited = (request.sampling_params for request in model.scheduler.requests)
    assert limited.thinking.budget == 5
    assert not unlimited.HasField("thinking")


@pytest.mark.parametrize("options", [{}, {"logprobs": True}, {"return_token_ids": True}, {"include_reasoning": False}])
async def test_answers_are_as_documented_and_say_all_of_tokens(
    http: httpx.AsyncClient, model: Model, document: dict[str, Any], options: dict[str, Any]
) -> None:
    route = "/v1/chat/completions"
    model.output = f"{THOUGHT}I look.\n{CALL}"
    body = {"messages": QUESTION, "tools": [TOOL]} | options
    whole = (await http.post(route, json=body)).json()
    check(document, route, "post", 200, "application/json", whole)
    response = await http.post(route, json=body | {"stream": True})
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    for chunk in chunks:
        check(document, route, "post", 200, "text/event-stream", chunk)
    choices = [chunk["choices"][0] for chunk in chunks]
    [choice] = whole["choices"]
    if "logprobs" in options:
        assert [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]] == choice["logprobs"]["content"]
    if "return_token_ids" in options:
        assert [t for c in choices for t in c.get("token_ids", [])] == choice["token_ids"]


LISTED = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'


@pytest.mark.parametrize(
    ("output", "said", "options"),
    [
        (f"{THOUGHT}I look.\n{CALL}\n{SECOND}", ("Where? Zürich.", "I look."), {"tools": [TOOL, NOW]}),
        (f"{THOUGHT}I look.\n{CALL}\n{SECOND}", ("Where? Zürich.", "I look."), {"tools": [STRICT, NOW]}),
        (LISTED, ("", ""), {"tools": [TOOL, NOW], "tool_choice": "required"}),
    ],
    ids=["free", "strict", "required"],
)
async def test_services_that_die_in_the_middle_of_a_call(
    line: TokenizerLine,
    pool: TokenizerPool,
    model: Model,
    output: str,
    said: tuple[str, str],
    options: dict[str, Any],
) -> None:
    """The tokenizer service goes away again and again: nothing is repeated, nothing is missing."""
    model.output, model.scheduler.auto = output, False
    num_tokens = len(model.tokens(TokenRequest()))
    async with running_gateway(line.config.listen) as http, openai_client(http) as ai:
        answer: asyncio.Task[list[Any]] | None = None
        while answer is None or not answer.done():
            async with line.running(pool=pool):
                await wait_ready(http)
                answer = answer or asyncio.create_task(streamed(ai, **options))
                await model.scheduler.until(lambda: model.scheduler.num_running == 1)
                for _ in range(num_tokens // 5):
                    model.scheduler.step()
                    await asyncio.sleep(0.01)
                if not model.scheduler.num_running:
                    await answer
    assert len(model.scheduler.requests) > 3 and model.scheduler.submissions[-1].resume_token_ids
    assert len({request.sampling_params.grammar.structural_tag for request in model.scheduler.requests}) == 1
    choices = answer.result()
    deltas = [choice.delta for choice in choices]
    assert "".join(delta.reasoning for delta in deltas if "reasoning" in (delta.model_extra or {})) == said[0]
    assert "".join(delta.content or "" for delta in deltas) == said[1]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.id] == ["get_weather", "now"]
    assert ["".join(c.function.arguments for c in calls if c.index == index) for index in (0, 1)] == [ARGUMENTS, "{}"]
    assert choices[-1].finish_reason == "tool_calls"
