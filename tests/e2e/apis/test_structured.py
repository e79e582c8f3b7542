"""Structured output over REST."""

import json
import re
from typing import Literal

import openai
import pydantic
import pytest

from tests.e2e.line import Line


class Step(pydantic.BaseModel):
    kind: Literal["walk", "train", "🚲"]
    minutes: int = pydantic.Field(ge=1, le=999)


class Trip(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=30)
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)
    note: str | None = pydantic.Field(max_length=20)


def asking(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_parse_of_the_official_client(quick_line: Line, temperature: float) -> None:
    async with quick_line.openai() as client:
        answer = await client.chat.completions.parse(
            model="m",
            messages=asking("Plan a short trip to Paris, as JSON."),
            response_format=Trip,
            temperature=temperature,
            max_tokens=300,
            n=2,
            seed=3,
        )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Trip)


async def test_streamed_is_what_the_whole_answer_is(line: Line) -> None:
    schema = {"type": "object", "properties": {"capital": {"enum": ["Berlin", "Paris"]}}, "required": ["capital"]}
    body = {
        "model": "m",
        "messages": asking("What is the capital of France?"),
        "temperature": 0,
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    async with line.openai() as client:
        answer = await client.chat.completions.create(**body)
        chunks = [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content
    assert json.loads(text)["capital"] == "Paris"


async def test_forms_of_vllm(quick_line: Line) -> None:
    async with quick_line.openai() as client:

        async def completion(**extra: object) -> str:
            answer = await client.completions.create(
                model="m", prompt="My phone number is", max_tokens=60, temperature=1.5, seed=1, extra_body=extra
            )
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].text

        number = r"\+[0-9]{2} [0-9]{4,6}"
        assert re.fullmatch(number, await completion(structured_outputs={"regex": number}))
        assert re.fullmatch("[a-f]{3}", await completion(guided_regex="[a-f]{3}"))
        assert await completion(structured_outputs={"choice": ["north", "süd"]}) in ("north", "süd")
        assert await completion(guided_grammar='root ::= ("ab" | "cd")') in ("ab", "cd")
        point = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}, "required": ["x"]}
        dense = await completion(
            structured_outputs={"json": point | {"additionalProperties": False}, "disable_any_whitespace": True}
        )
        assert re.fullmatch(r'\{"x":-?\d+\}', dense)


async def test_a_schema_that_cannot_be_guaranteed_is_refused_with_its_place(quick_line: Line) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    async with quick_line.openai() as client:
        with pytest.raises(openai.BadRequestError, match="#/properties/tags/uniqueItems"):
            await client.chat.completions.create(
                model="m",
                messages=asking("hi"),
                response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            )
