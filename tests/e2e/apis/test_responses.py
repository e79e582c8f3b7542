"""The Responses API of a real line: conversations, and a response in the background that outlives every service."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.line import Line

STORY: dict[str, Any] = {
    "model": "m",
    "input": "Tell me a long story about a lighthouse.",
    "max_output_tokens": 160,
    "extra_body": {"seed": 11, "ignore_eos": True},
}


async def test_a_conversation(line: Line) -> None:
    async with line.openai() as ai:
        first = await ai.responses.create(
            model="m", input="What is the capital of France?", instructions="Answer in one sentence.", temperature=0
        )
        assert "Paris" in first.output_text
        assert first.status == "completed"
        async with ai.responses.stream(
            model="m", input="Say that again.", previous_response_id=first.id, temperature=0, max_output_tokens=24
        ) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        second = await ai.responses.retrieve((await stream.get_final_response()).id)
    assert "".join(deltas) == second.output_text
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.slow
async def test_a_background_response_survives_the_death_of_every_service(line: Line) -> None:
    async with line.openai() as ai:
        undisturbed = await ai.responses.create(**STORY)
        events, id = [], ""
        with pytest.raises((httpx.HTTPError, openai.APIConnectionError)):
            async for event in await ai.responses.create(**STORY, background=True, stream=True):
                events.append(event)
                if event.type == "response.created":
                    id = event.response.id
                if sum(event.type == "response.output_text.delta" for event in events) == 3:
                    for service in ("tokenizer", "scheduler", "executor", "gateway"):
                        line.restart(service)
        await line.wait_ready()
        seen = events[-1].sequence_number
        async with asyncio.timeout(60):
            rest = [event async for event in await ai.responses.retrieve(id, stream=True, starting_after=seen)]
        assert [event.sequence_number for event in [*events, *rest]] == list(range(len(events) + len(rest)))
        text = "".join(event.delta for event in [*events, *rest] if event.type == "response.output_text.delta")
        assert text == undisturbed.output_text
        assert (await ai.responses.retrieve(id)).output_text == text
        assert rest[-1].type == "response.incomplete"
