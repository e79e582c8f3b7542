"""Anthropic's official client, against the real model."""

from typing import Any, Literal

import anthropic
import pydantic
import pytest

from tests.e2e.line import NO_CERTIFICATES, Line

QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY: Any = {"model": "m", "max_tokens": 32, "messages": QUESTION, "extra_body": {"temperature": 0}}


def claude_of(line: Line) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=line.base_url,
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES),
    )


async def test_streamed_and_whole_say_the_same(line: Line) -> None:
    async with claude_of(line) as claude:
        whole = await claude.messages.create(**GREEDY)
        async with claude.messages.stream(**GREEDY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        count = await claude.messages.count_tokens(model="m", messages=QUESTION)
    assert "Paris" in text and text == whole.content[0].text == final.content[0].text
    assert whole.stop_reason == final.stop_reason == "end_turn"
    for usage in (whole.usage, final.usage):
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert final.usage.cache_read_input_tokens > 0


async def test_an_answer_goes_on_and_stops(line: Line) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    async with claude_of(line) as claude:
        answer = await claude.messages.create(**GREEDY | {"messages": begun, "stop_sequences": ["."]})
    assert answer.content[0].text == " Paris"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ".")


async def test_an_answer_that_fills_the_context(quick_line: Line) -> None:
    body = GREEDY | {"system": "word " * 400, "max_tokens": 8000, "extra_body": {"temperature": 3}}
    async with claude_of(quick_line) as claude:
        answer = await claude.messages.create(**body)
    assert answer.stop_reason == "model_context_window_exceeded"


async def test_parse(quick_line: Line) -> None:
    class Capital(pydantic.BaseModel):
        country: Literal["France", "Spain"]
        city: Literal["Madrid", "Paris"]

    async with claude_of(quick_line) as claude:
        answer = await claude.messages.parse(**GREEDY | {"max_tokens": 100}, output_format=Capital)
    assert isinstance(answer.parsed_output, Capital)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner(quick_line: Line, stream: bool) -> None:
    """Tools are called by a model that was never trained to."""
    asked = []

    @anthropic.beta_async_tool
    async def capital_of(country: Literal["France", "Spain"]) -> str:
        """The capital of a country."""
        asked.append(country)
        return "Paris"

    async with claude_of(quick_line) as claude:
        runner = claude.beta.messages.tool_runner(
            **GREEDY | {"max_tokens": 64},
            tools=[capital_of],
            tool_choice={"type": "tool", "name": "capital_of"},
            max_iterations=2,
            stream=stream,
        )
        last = await runner.until_done()
    assert last.stop_reason == "tool_use"
    assert len(asked) == 2 and {*asked} <= {"France", "Spain"}


async def test_errors(line: Line) -> None:
    async with claude_of(line) as claude:
        with pytest.raises(anthropic.NotFoundError, match="nobody") as error:
            await claude.messages.create(**GREEDY | {"model": "nobody"})
        assert error.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="4096"):
            await claude.messages.create(**GREEDY | {"system": "word " * 5000})
        models = [model async for model in claude.models.list()]
    assert [(model.id, model.max_input_tokens) for model in models] == [("m", 4096)]
