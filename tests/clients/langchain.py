"""LangChain: ChatOpenAI and OpenAIEmbeddings. Needs langchain-openai; see README.md."""

import asyncio
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

CHAT, EMBED, SCRIPTED = (os.environ[f"PAGEWIRE_{name}"] for name in ("CHAT", "EMBED", "SCRIPTED"))
QUESTION = "What is the capital of France? Answer in one sentence."


class City(BaseModel):
    """A city and its country."""

    name: str
    country: str
    size: Literal["small", "large"]


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def chat(url: str = CHAT, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="any", temperature=0, max_retries=0, **options)  # type: ignore[arg-type]


def model_name(url: str) -> str:
    return {CHAT: "smollm2-135m-instruct", EMBED: "all-minilm-l6-v2", SCRIPTED: "scripted"}[url]


def text() -> None:
    llm = chat(model=model_name(CHAT), max_tokens=40)
    answer = llm.invoke([SystemMessage("You are helpful."), HumanMessage(QUESTION)])
    assert "Paris" in answer.text, answer
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"
    chunks = list(llm.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.text for chunk in chunks) == llm.invoke(QUESTION).text
    assert any(chunk.usage_metadata for chunk in chunks)
    first, second = llm.batch([QUESTION, "1, 2, 3, 4,"])
    assert first.text == llm.invoke(QUESTION).text and second.text
    logprobs = llm.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]
    assert len(logprobs["content"][0]["top_logprobs"]) == 2
    stopped = llm.bind(stop=["Paris"]).invoke(QUESTION)
    assert "Paris" not in stopped.text
    older = OpenAI(base_url=CHAT, api_key="any", model=model_name(CHAT), temperature=0, max_tokens=8)  # type: ignore[arg-type, call-arg]
    assert "Paris" in older.invoke("The capital of France is")
    assert len(older.generate(["Once", "Twice"]).generations) == 2


async def asynchronous() -> None:
    llm = chat(model=model_name(CHAT), max_tokens=40)
    chunks = [chunk async for chunk in llm.astream(QUESTION)]
    assert "".join(chunk.text for chunk in chunks) == (await llm.ainvoke(QUESTION)).text
    answers = await llm.abatch([QUESTION] * 3)
    assert len({answer.text for answer in answers}) == 1
    events = [event["event"] async for event in llm.astream_events(QUESTION)]
    assert "on_chat_model_stream" in events


def structured() -> None:
    llm = chat(model=model_name(CHAT), max_tokens=80)
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            city = llm.with_structured_output(City, method=method, strict=strict).invoke(QUESTION)
            assert isinstance(city, City), (method, strict, city)
    whole = llm.with_structured_output(City, include_raw=True).invoke(QUESTION)
    assert isinstance(whole["parsed"], City) and not whole["parsing_error"], whole
    as_dict = llm.with_structured_output(City.model_json_schema(), method="json_schema").invoke(QUESTION)
    assert City.model_validate(as_dict)
    free = chat(model=model_name(SCRIPTED), url=SCRIPTED).with_structured_output(None, method="json_mode")
    assert free.invoke("Numbers, as JSON") == {"a": 2, "b": 3}
    partial = list(chat(model=model_name(CHAT), max_tokens=80).with_structured_output(City).stream(QUESTION))
    assert isinstance(partial[-1], City), partial


def tools() -> None:
    llm = chat(SCRIPTED, model=model_name(SCRIPTED)).bind_tools([add])
    messages: list[Any] = [HumanMessage("What is 2 + 3?")]
    answer = llm.invoke(messages)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3}), answer
    messages += [answer, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]
    assert llm.invoke(messages).text == "It is 5."

    whole: Any = None
    for chunk in llm.stream("What is 2 + 3?"):
        whole = chunk if whole is None else whole + chunk
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("add", {"a": 2, "b": 3})], whole
    forced = chat(model=model_name(CHAT), max_tokens=60)
    for choice in ("any", "add"):
        answer = forced.bind_tools([add], tool_choice=choice).invoke("What is 2 + 3?")
        assert isinstance(answer, AIMessage) and answer.tool_calls[0]["name"] == "add", (choice, answer)
    strict = chat(SCRIPTED, model=model_name(SCRIPTED)).bind_tools([add], strict=True, parallel_tool_calls=False)
    assert strict.invoke("What is 2 + 3?").tool_calls[0]["args"] == {"a": 2, "b": 3}


def responses() -> None:
    llm = chat(model=model_name(CHAT), max_tokens=80, use_responses_api=True)
    answer = llm.invoke(QUESTION)
    assert "Paris" in answer.text
    assert "".join(chunk.text for chunk in llm.stream(QUESTION)) == answer.text
    assert isinstance(llm.with_structured_output(City).invoke(QUESTION), City)
    agent = chat(SCRIPTED, model=model_name(SCRIPTED), use_responses_api=True).bind_tools([add])
    messages: list[Any] = [HumanMessage("What is 2 + 3?")]
    called = agent.invoke(messages)
    messages += [called, ToolMessage("5", tool_call_id=called.tool_calls[0]["id"])]
    assert agent.invoke(messages).text == "It is 5."


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True)) / math.hypot(*left) / math.hypot(*right)


def embeddings() -> None:
    model = OpenAIEmbeddings(base_url=EMBED, api_key="any", model=model_name(EMBED), check_embedding_ctx_length=False)  # type: ignore[arg-type, call-arg]
    query = model.embed_query("How do I page memory?")
    near, far = model.embed_documents(["Memory is divided into pages.", "Cats sleep a lot."])
    assert cosine(query, near) > cosine(query, far)
    assert len(asyncio.run(model.aembed_query("q"))) == len(query)


def errors() -> None:
    import openai

    for options, error in (({"top_p": 7.0}, openai.BadRequestError), ({"model": "nobody"}, openai.NotFoundError)):
        try:
            chat(**({"model": model_name(CHAT)} | options)).invoke(QUESTION)
        except error as raised:
            assert raised.body
        else:
            raise AssertionError(f"{options} was taken")


if __name__ == "__main__":
    for check in (text, structured, tools, responses, embeddings, errors):
        check()
        print(f"langchain: {check.__name__} ok")
    asyncio.run(asynchronous())
    print("langchain: asynchronous ok")
