"""OpenAI's official client: helpers, headers, exceptions, retries; synchronous and asynchronous."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import httpx
import openai
import pydantic
import pytest

from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = "<user>hi<assistant>"
CHAT: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "seed": 7}
T = TypeVar("T")


class Point(pydantic.BaseModel):
    x: int
    y: int


def saying(text: str) -> Callable[..., str]:
    return lambda prompt, seed, num_tokens: text[:num_tokens]


async def synchronously(client: httpx.AsyncClient, use: Callable[[openai.OpenAI], T]) -> T:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=0) as official:
        return await asyncio.to_thread(use, official)


async def test_the_synchronous_client(client: httpx.AsyncClient) -> None:
    def use(ai: openai.OpenAI) -> None:
        text = expected_text(PROMPT, 7)
        assert ai.chat.completions.create(**CHAT).choices[0].message.content == text
        with ai.chat.completions.create(**CHAT, stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
        assert ai.completions.create(model="fake", prompt="p", seed=1, max_tokens=5).choices[0].text
        assert [model.id for model in ai.models.list()] == ["fake", "alias"]
        assert ai.models.retrieve("alias").id == "alias"
        # base64 by default, which the client turns into numbers
        assert ai.embeddings.create(model="fake", input=["ab", "c"]).data[0].embedding == [2, 0.5]
        assert ai.embeddings.create(model="fake", input="ab", encoding_format="float").data[0].embedding == [2, 0.5]

    await synchronously(client, use)


async def test_raw_responses_have_the_request_id(ai: openai.AsyncOpenAI) -> None:
    headers = {"x-request-id": "mine"}
    raw = await ai.chat.completions.with_raw_response.create(**CHAT, extra_headers=headers)
    assert raw.headers["x-request-id"] == raw.request_id == "mine"
    assert raw.parse().id == "chatcmpl-mine"
    assert (await ai.chat.completions.create(**CHAT))._request_id
    async with ai.chat.completions.with_streaming_response.create(**CHAT, stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def test_parse_and_stream_give_objects(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    fake.generate = saying('{"x": 3, "y": 4}|')
    asked = CHAT | {"stop": "|"}
    parsed = await ai.chat.completions.parse(**asked, response_format=Point)
    assert parsed.choices[0].message.parsed == Point(x=3, y=4)
    assert json.loads(fake.received[-1].sampling_params.grammar.json_schema)["required"] == ["x", "y"]

    events = []
    async with ai.chat.completions.stream(
        **asked, response_format=Point, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        async for event in stream:
            events.append(event)
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Point(x=3, y=4)
    assert final.usage.completion_tokens == 17
    kinds = [event.type for event in events]
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} == {*kinds}
    assert "".join(event.delta for event in events if event.type == "content.delta") == '{"x": 3, "y": 4}'


async def test_an_object_that_is_cut_off_is_an_exception(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    fake.generate = saying('{"x": 3, "y": 4}')
    with pytest.raises(openai.LengthFinishReasonError):
        await ai.chat.completions.parse(**CHAT, response_format=Point, max_tokens=4)


async def test_a_wrong_key_is_an_authentication_error(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, api_key="right") as client:
        await wait_ready(client)
        for key, exception in (("wrong", openai.AuthenticationError), ("right", None)):
            async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key=key, max_retries=0) as ai:
                if exception is None:
                    assert (await ai.models.list()).data
                    continue
                with pytest.raises(exception):
                    await ai.models.list()


async def test_a_full_server_is_tried_again(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """The client waits for the delay in Retry-After."""
    fake.error = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests wait")
    async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=1) as ai:
        answer = asyncio.create_task(ai.chat.completions.create(**CHAT))
        await eventually(lambda: fake.received)
        fake.error = None
        assert (await answer).choices[0].message.content == expected_text(PROMPT, 7)
    assert len(fake.received) == 2


async def test_a_client_that_loses_patience_frees_its_place(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    fake.running.clear()
    for stream in (False, True):
        with pytest.raises(openai.APITimeoutError):
            await ai.with_options(timeout=0.05).chat.completions.create(**CHAT, stream=stream)
    fake.running.set()
    await eventually(lambda: len(fake.aborted) == 2)
    stream = await ai.chat.completions.create(**CHAT | {"max_tokens": 900}, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await eventually(lambda: len(fake.aborted) == 3)


async def test_refusals_name_the_parameter(ai: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await ai.chat.completions.create(**CHAT, audio={"voice": "ash", "format": "wav"})
    assert (refused.value.param, refused.value.code, refused.value.type) == (
        "audio", "unsupported_parameter", "invalid_request_error",
    )  # fmt: skip
    with pytest.raises(openai.NotFoundError) as unknown:
        await ai.chat.completions.create(**CHAT | {"model": "missing"})
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
