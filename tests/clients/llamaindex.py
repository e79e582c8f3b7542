"""LlamaIndex: OpenAILike, OpenAI and embeddings. Needs llama-index packages; see README.md."""

import asyncio
import os
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

CHAT, EMBED, SCRIPTED = (os.environ[f"PAGEWIRE_{name}"] for name in ("CHAT", "EMBED", "SCRIPTED"))
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France? Answer in one sentence."


class City(BaseModel):
    """A city and its country."""

    name: str
    country: str
    size: Literal["small", "large"]


class Pair(BaseModel):
    """Two numbers."""

    a: int
    b: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def like(url: str = CHAT, model: str = MODEL, **options: Any) -> OpenAILike:
    options = {"is_chat_model": True, "max_tokens": 60, "temperature": 0, "max_retries": 0} | options
    return OpenAILike(api_base=url, api_key="any", model=model, context_window=2048, **options)


def text() -> None:
    chat = like()
    messages = [ChatMessage(role="system", content="You are helpful."), ChatMessage(role="user", content=QUESTION)]
    answer = chat.chat(messages)
    assert "Paris" in (answer.message.content or ""), answer
    *_, last = chat.stream_chat(messages)
    assert last.message.content == answer.message.content
    assert "Paris" in chat.complete(QUESTION).text
    plain = like(is_chat_model=False, max_tokens=8)
    assert "Paris" in plain.complete("The capital of France is").text
    *_, end = plain.stream_complete("The capital of France is")
    assert "Paris" in end.text
    logprobs = like(logprobs=True, top_logprobs=2).chat(messages).logprobs
    assert logprobs and len(logprobs[0]) == 2


async def asynchronous() -> None:
    chat = like()
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = await chat.achat(messages)
    chunks = [chunk async for chunk in await chat.astream_chat(messages)]
    assert chunks[-1].message.content == answer.message.content
    assert (await chat.acomplete(QUESTION)).text
    agent = FunctionAgent(tools=[add], llm=like(SCRIPTED, "scripted", is_function_calling_model=True))
    assert str(await agent.run("What is 2 + 3?")) == "It is 5."


def structured() -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    modes: tuple[dict[str, Any], ...] = ({"should_use_structured_outputs": True}, {"is_function_calling_model": True})
    for options in modes:
        llm = like(**options).as_structured_llm(City)
        assert isinstance(llm.chat(messages).raw, City), options
        assert isinstance(like(**options).structured_predict(City, PromptTemplate(QUESTION)), City), options
    *_, last = like(should_use_structured_outputs=True).as_structured_llm(City).stream_chat(messages)
    assert isinstance(last.raw, City)
    # Streamed, a tool is offered and not required.
    *_, last = like(SCRIPTED, "scripted", is_function_calling_model=True).as_structured_llm(Pair).stream_chat(messages)
    assert (last.raw.a, last.raw.b) == (2, 3), last
    program = LLMTextCompletionProgram.from_defaults(
        output_cls=City,
        prompt_template_str=QUESTION,
        llm=like(
            additional_kwargs={
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "city", "schema": City.model_json_schema()},
                }
            }
        ),
    )
    assert isinstance(program(), City)


def tools() -> None:
    tool = FunctionTool.from_defaults(add)
    llm = like(SCRIPTED, "scripted", is_function_calling_model=True)
    answer = llm.chat_with_tools([tool], "What is 2 + 3?")
    [call] = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("add", {"a": 2, "b": 3})
    *_, streamed = llm.stream_chat_with_tools([tool], "What is 2 + 3?")
    assert [one.tool_kwargs for one in llm.get_tool_calls_from_response(streamed)] == [{"a": 2, "b": 3}]
    assert str(llm.predict_and_call([tool], "What is 2 + 3?")) == "5"
    forced = like(is_function_calling_model=True).chat_with_tools([tool], QUESTION, tool_required=True)
    assert like(is_function_calling_model=True).get_tool_calls_from_response(forced)[0].tool_name == "add"


def official() -> None:
    """LlamaIndex's OpenAI class knows the names of OpenAI's models only: serve under one of them."""
    llm = OpenAI(api_base=CHAT, api_key="any", model="gpt-4o-mini", temperature=0, max_tokens=60, max_retries=0)
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert "Paris" in (llm.chat(messages).message.content or "")
    assert isinstance(llm.as_structured_llm(City).chat(messages).raw, City)
    assert "Paris" in llm.complete(QUESTION).text


def embeddings() -> None:
    model = OpenAILikeEmbedding(model_name="all-minilm-l6-v2", api_base=EMBED, api_key="any")
    assert len(model.get_query_embedding("q")) == 384
    assert len(model.get_text_embedding_batch(["one", "two", "three"])) == 3
    known = OpenAIEmbedding(model_name="all-minilm-l6-v2", api_base=EMBED, api_key="any")
    assert known.get_text_embedding("q") == model.get_text_embedding("q")


if __name__ == "__main__":
    for check in (text, structured, tools, official, embeddings):
        check()
        print(f"llamaindex: {check.__name__} ok")
    asyncio.run(asynchronous())
    print("llamaindex: asynchronous ok")
