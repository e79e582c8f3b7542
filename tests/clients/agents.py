"""OpenAI's Agents SDK, which speaks the Responses API. Needs openai-agents; see README.md."""

import asyncio
import os
import sys

# Python puts this folder first, where this file has the name of the package.
sys.path.pop(0)

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

CHAT, SCRIPTED = (os.environ[f"PAGEWIRE_{name}"] for name in ("CHAT", "SCRIPTED"))
QUESTION = "What is the capital of France?"
called: list[tuple[int, int]] = []


class City(BaseModel):
    name: str


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    called.append((a, b))
    return str(a + b)


def model(url: str, name: str) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(model=name, openai_client=AsyncOpenAI(base_url=url, api_key="any", max_retries=0))


async def conversations() -> None:
    smollm = model(CHAT, "smollm2-135m-instruct")
    agent = Agent(
        name="A", instructions="Be brief.", model=smollm, model_settings=ModelSettings(temperature=0, max_tokens=60)
    )
    first = await Runner.run(agent, QUESTION)
    assert "Paris" in first.final_output
    again = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And of Italy?"}])
    stored = await Runner.run(agent, "And of Italy?", previous_response_id=first.last_response_id)
    assert again.final_output == stored.final_output
    session = SQLiteSession("s")
    await Runner.run(agent, QUESTION, session=session)
    assert (await Runner.run(agent, "And of Italy?", session=session)).final_output == stored.final_output
    typed = Agent(
        name="T",
        model=smollm,
        output_type=City,
        model_settings=ModelSettings(
            temperature=0, store=False, truncation="auto", response_include=["reasoning.encrypted_content"]
        ),
    )
    assert isinstance((await Runner.run(typed, "A city in Japan?")).final_output, City)


async def tools() -> None:
    agent = Agent(name="S", instructions="Use tools.", model=model(SCRIPTED, "scripted"), tools=[add])
    run = await Runner.run(agent, "What is 2 + 3?")
    assert (run.final_output, called) == ("It is 5.", [(2, 3)])
    kinds = [item.type for item in run.new_items]
    assert kinds == [
        "reasoning_item",
        "tool_call_item",
        "tool_call_output_item",
        "reasoning_item",
        "message_output_item",
    ]
    streamed = Runner.run_streamed(agent, "What is 2 + 3?")
    events = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert (streamed.final_output, events.count("response.completed")) == ("It is 5.", 2)
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= set(events)


if __name__ == "__main__":
    set_tracing_disabled(True)
    for check in (conversations, tools):
        asyncio.run(check())
        print(f"agents: {check.__name__} ok")
