"""LiteLLM, instructor, pydantic-ai and Anthropic's client, each where it is installed; see README.md."""

import asyncio
import importlib.util
import json
import os
from typing import Any, Literal

from pydantic import BaseModel

CHAT, EMBED, SCRIPTED = (os.environ[f"PAGEWIRE_{name}"] for name in ("CHAT", "EMBED", "SCRIPTED"))
MODEL = "smollm2-135m-instruct"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class City(BaseModel):
    name: str
    country: str
    size: Literal["small", "large"]


def litellm() -> None:
    import litellm

    common: Any = {"api_base": CHAT, "api_key": "any", "temperature": 0, "max_tokens": 60, "num_retries": 0}
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, **common)
        assert "Paris" in answer.choices[0].message.content and answer.usage.total_tokens
        chunks = list(litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, stream=True, **common))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
        parsed = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, response_format=City, **common)
        City.model_validate_json(parsed.choices[0].message.content)
        scripted = common | {"api_base": SCRIPTED}
        called = litellm.completion(model=f"{provider}/scripted", messages=MESSAGES, tools=[ADD], **scripted)
        [call] = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        assert called.choices[0].message.reasoning_content == "A tool."
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="The capital of France is", **common)
    assert "Paris" in text.choices[0].text
    vectors = litellm.embedding(model="openai/all-minilm-l6-v2", input=["a", "b"], api_base=EMBED, api_key="any")
    assert [len(item["embedding"]) for item in vectors.data] == [384, 384]
    ranked = litellm.rerank(
        model="hosted_vllm/all-minilm-l6-v2", query="paging", documents=["cats", "pages"],
        api_base=EMBED.removesuffix("/v1"), api_key="any",
    )  # fmt: skip
    assert ranked.results[0]["index"] == 1
    try:
        litellm.completion(model="openai/nobody", messages=MESSAGES, **common)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("a model that is not there was taken")
    assert asyncio.run(litellm.acompletion(model=f"openai/{MODEL}", messages=MESSAGES, **common)).choices


def instructor() -> None:
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(openai.OpenAI(base_url=CHAT, api_key="any", max_retries=0), mode=mode)
        options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 80, "temperature": 0, "max_retries": 0}
        assert isinstance(client.chat.completions.create(response_model=City, **options), City), mode
        if mode is not instructor.Mode.TOOLS_STRICT:
            *_, last = client.chat.completions.create_partial(response_model=City, **options)
            assert last.size in ("small", "large"), mode


def pydantic_ai() -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    for model in (OpenAIChatModel, OpenAIResponsesModel):
        for form in (NativeOutput, ToolOutput):
            smollm = model(MODEL, provider=OpenAIProvider(base_url=CHAT, api_key="any"))
            settings: Any = {"temperature": 0, "max_tokens": 120}
            agent = Agent(smollm, output_type=form(City), retries=0, model_settings=settings)
            assert isinstance(agent.run_sync(MESSAGES[0]["content"]).output, City), (model, form)


def anthropic() -> None:
    """Streams calls: whole, without arguments, several, and cut off after every token."""
    import anthropic

    client = anthropic.Anthropic(base_url=CHAT.removesuffix("/v1"), api_key="any", max_retries=0)
    add = {"name": "add", "input_schema": ADD["function"]["parameters"] | {"required": ["a", "b"]}}
    now = {"name": "now", "input_schema": {"type": "object", "properties": {}}}

    def called(choice: dict[str, Any], *tools: Any, max_tokens: int = 200, **options: Any) -> Any:
        given: Any = {"max_tokens": max_tokens, "messages": MESSAGES, "tools": tools, "tool_choice": choice}
        with client.messages.stream(model=MODEL, **given, extra_body={"temperature": 0, **options}) as stream:
            written = [event.partial_json for event in stream if event.type == "input_json"]
            message: Any = stream.get_final_message()
        return message.stop_reason, [(block.name, block.input) for block in message.content], "".join(written)

    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        stop_reason, [(name, values)], written = called(choice, add)
        assert (stop_reason, name, values.keys()) == ("tool_use", "add", {"a", "b"})
        for max_tokens in range(1, 25):
            stop_reason, calls, beginning = called(choice, add, max_tokens=max_tokens)
            assert written.startswith(beginning) and all(name == "add" for name, _ in calls)
            assert stop_reason == "max_tokens" or beginning == written, (max_tokens, stop_reason)
    assert called({"type": "any"}, now)[:2] == ("tool_use", [("now", {})])
    several = {"type": "any", "disable_parallel_tool_use": False}
    assert any(len(called(several, now, temperature=1)[1]) > 1 for _ in range(20))


if __name__ == "__main__":
    for check in (litellm, instructor, pydantic_ai, anthropic):
        if importlib.util.find_spec(check.__name__):
            check()
            print(f"{check.__name__} ok")
