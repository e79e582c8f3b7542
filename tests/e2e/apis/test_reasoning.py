"""Reasoning with a budget, and JSON after it, from the default model: every output is taken for reasoning at first."""

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from tests.e2e.line import Line

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["Norway", "Peru"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Name a city in Norway."}],
    "temperature": 0.8,
    "seed": 5,
    "n": 2,
    "max_tokens": 200,
    "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
    "stream": True,
    "stream_options": {"include_usage": True},
}
BUDGET = 25
# This model's </think> is three tokens, of which the last one alone is no reasoning.
NUM_THOUGHT = BUDGET + 2


@pytest.fixture
async def thinking(line: Line) -> AsyncIterator[Line]:
    before = line.flags.get("tokenizer", [])
    line.restart("tokenizer", *before, "--reasoning-parser", "deepseek_r1")
    await line.wait_ready()
    yield line
    line.flags["tokenizer"] = before
    line.restart("tokenizer")
    await line.wait_ready()


async def generate(line: Line, kill_after: int = 0) -> tuple[list[str], list[str], Any]:
    """Returns (reasoning, content) of the choices, and the usage. kill_after: chunks, after which the tokenizer is
    killed."""
    reasoning, content, usage, num_chunks = ["", ""], ["", ""], None, 0
    async with line.openai() as client:
        body = BODY | {"extra_body": {"thinking_token_budget": BUDGET}}
        async for chunk in await client.chat.completions.create(**body):
            num_chunks += 1
            if num_chunks == kill_after:
                line.restart("tokenizer")
            usage = chunk.usage
            for choice in chunk.choices:
                reasoning[choice.index] += (choice.delta.model_extra or {}).get("reasoning", "")
                content[choice.index] += choice.delta.content or ""
    return reasoning, content, usage


@pytest.mark.slow
async def test_json_after_the_reasoning_also_when_a_service_is_killed_in_it(thinking: Line) -> None:
    reasoning, content, usage = await generate(thinking)
    for thought, answer in zip(reasoning, content, strict=True):
        assert thought and "</" not in thought
        jsonschema.validate(json.loads(answer), SCHEMA)
    assert usage.completion_tokens_details.reasoning_tokens == 2 * NUM_THOUGHT
    again = await generate(thinking, kill_after=12)
    assert again[:2] == (reasoning, content)
    assert again[2].completion_tokens_details == usage.completion_tokens_details
