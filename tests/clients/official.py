"""The official openai client, over all that it has and the server serves. Needs openai; see README.md."""

import asyncio
import json
import os
import time
from typing import Any, Literal

import openai
from pydantic import BaseModel

CHAT, EMBED, SCRIPTED = (os.environ[f"PAGEWIRE_{name}"] for name in ("CHAT", "EMBED", "SCRIPTED"))
MODEL = "smollm2-135m-instruct"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 80}
RESPOND: dict[str, Any] = {"model": MODEL, "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 80}


class City(BaseModel):
    name: str
    country: str
    size: Literal["small", "large"]


class Add(BaseModel):
    a: int
    b: int


def client(url: str = CHAT, **options: Any) -> Any:
    return openai.OpenAI(base_url=url, api_key="any", max_retries=0, **options)


def text() -> None:
    ai = client()
    answer = ai.chat.completions.create(**ASKED)
    assert "Paris" in answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"
    chunks = list(ai.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert streamed == answer.choices[0].message.content and chunks[-1].usage.total_tokens == answer.usage.total_tokens
    several = ai.chat.completions.create(**ASKED | {"temperature": 1, "seed": 1}, n=3, logprobs=True, top_logprobs=2)
    assert len(several.choices) == 3 and len(several.choices[2].logprobs.content[0].top_logprobs) == 2
    older = ai.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, echo=True
    )
    assert older.choices[0].text.startswith("The capital of France is Paris")
    pieces = ai.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=8, temperature=0, stream=True)
    assert "4, 5" in "".join(piece.choices[0].text for piece in pieces)


def structured() -> None:
    ai = client()
    assert isinstance(ai.chat.completions.parse(**ASKED, response_format=City).choices[0].message.parsed, City)
    with ai.chat.completions.stream(**ASKED, response_format=City) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    tools = [openai.pydantic_function_tool(Add)]
    forced = ai.chat.completions.parse(**ASKED, tools=tools, tool_choice="required")
    assert isinstance(forced.choices[0].message.tool_calls[0].function.parsed_arguments, Add)
    loop = client(SCRIPTED)
    asked: dict[str, Any] = {"model": "scripted", "tools": tools}
    turns: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    message = loop.chat.completions.parse(messages=turns, **asked).choices[0].message
    [call] = message.tool_calls
    assert call.function.parsed_arguments == Add(a=2, b=3)
    turns += [message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    with loop.chat.completions.stream(messages=turns, **asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == "It is 5."


def streamed_calls() -> None:
    """Whole, without arguments, and cut off after every token."""
    tools: list[Any] = [openai.pydantic_function_tool(Add), {"type": "function", "function": {"name": "now"}}]
    named: Any = {"type": "function", "function": {"name": "Add"}}

    def called(choice: Any, max_tokens: int = 80, only: Any = tools[0]) -> tuple[str, str]:
        whole, reason = "", ""
        asked = ASKED | {"max_tokens": max_tokens, "tools": [only], "tool_choice": choice}
        try:
            with client().chat.completions.stream(**asked) as stream:
                for event in stream:
                    if event.type == "tool_calls.function.arguments.delta":
                        whole += event.arguments_delta
                reason = stream.get_final_completion().choices[0].finish_reason
        except openai.LengthFinishReasonError as error:
            reason = error.completion.choices[0].finish_reason
        return whole, reason

    for choice in ("required", named):
        written, reason = called(choice)
        assert Add.model_validate_json(written) and reason == ("tool_calls" if choice == "required" else "stop")
        for max_tokens in range(1, 25):
            beginning, reason = called(choice, max_tokens)
            assert written.startswith(beginning), (beginning, written)
            assert reason == "length" or beginning == written, (max_tokens, reason)
    assert json.loads(called("required", only=tools[1])[0]) == {}


def responses() -> None:
    ai = client()
    answer = ai.responses.create(**RESPOND)
    assert "Paris" in answer.output_text
    assert ai.responses.retrieve(answer.id).output_text == answer.output_text
    assert ai.responses.input_items.list(answer.id).data
    assert ai.responses.create(**RESPOND | {"input": "And of Italy?"}, previous_response_id=answer.id).output_text
    with ai.responses.stream(**RESPOND, text_format=City) as stream:
        assert {"response.created", "response.output_text.delta", "response.completed"} <= {e.type for e in stream}
        assert isinstance(stream.get_final_response().output_parsed, City)
    assert isinstance(ai.responses.parse(**RESPOND, text_format=City).output_parsed, City)
    ai.responses.delete(answer.id)


def vectors_and_models() -> None:
    ai = client(EMBED)
    whole = ai.embeddings.create(model="all-minilm-l6-v2", input=["one", "two"])
    plain = ai.embeddings.create(model="all-minilm-l6-v2", input=["one", "two"], encoding_format="float")
    assert [len(item.embedding) for item in whole.data] == [384, 384]
    assert all(abs(x - y) < 1e-6 for x, y in zip(whole.data[1].embedding, plain.data[1].embedding, strict=True))
    assert ai.models.retrieve(ai.models.list().data[0].id).owned_by == "pagewire"


def batches() -> None:
    ai = client()
    body = {name: ASKED[name] for name in ("model", "messages")} | {"max_tokens": 4}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = ai.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = ai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    for _ in range(300):
        if (batch := ai.batches.retrieve(batch.id)).status == "completed":
            break
        time.sleep(0.1)
    [answer] = ai.files.content(batch.output_file_id).text.splitlines()
    assert json.loads(answer)["response"]["status_code"] == 200


def errors() -> None:
    ai = client()
    for options, error in (
        ({"top_p": 7}, openai.BadRequestError),
        ({"model": "nobody"}, openai.NotFoundError),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, openai.BadRequestError),
    ):
        try:
            ai.chat.completions.create(**ASKED | options)
        except error as raised:
            assert json.loads(raised.response.text)["error"]["message"] and raised.request_id
        else:
            raise AssertionError(f"{options} was taken")
    try:
        client(timeout=0.001).chat.completions.create(**ASKED)
    except openai.APITimeoutError:
        pass
    else:
        raise AssertionError("it answered within a millisecond")
    raw = ai.chat.completions.with_raw_response.create(**ASKED)
    assert raw.headers["x-request-id"] and "Paris" in raw.parse().choices[0].message.content


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=CHAT, api_key="any", max_retries=0) as ai:
        answers = await asyncio.gather(*(ai.chat.completions.create(**ASKED) for _ in range(4)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        chunks = [chunk async for chunk in await ai.chat.completions.create(**ASKED, stream=True)]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == answers[0].choices[0].message.content
        assert isinstance((await ai.responses.parse(**RESPOND, text_format=City)).output_parsed, City)
        assert [model.id async for model in ai.models.list()]


if __name__ == "__main__":
    for check in (text, structured, streamed_calls, responses, vectors_and_models, batches, errors):
        check()
        print(f"openai: {check.__name__} ok")
    asyncio.run(asynchronous())
    print("openai: asynchronous ok")
