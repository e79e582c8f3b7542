"""Clients as users write them, against the real model where its answers matter."""

import json
from typing import Any

import grpc
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.v1 import common_pb2, inference_pb2, scheduler_pb2
from pagewire.wire import rpc
from tests.e2e.line import Line, http_client

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


async def test_openai_chat(line: Line) -> None:
    async with line.openai() as client:
        answer = await client.chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=32)
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="m",
                messages=QUESTION,
                temperature=0,
                max_tokens=32,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert streamed == answer.choices[0].message.content
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


async def test_openai_completions(line: Line) -> None:
    async with line.openai() as client:
        answer = await client.completions.create(
            model="m", prompt=["The capital of France is", "1, 2, 3, 4,"], max_tokens=8, temperature=0, logprobs=2, n=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert "Paris" in answer.choices[0].text and answer.choices[0].text == answer.choices[1].text
        assert answer.choices[2].text.startswith(" 5, 6")
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and len(logprobs.tokens) == 8
        assert "".join(logprobs.tokens) == answer.choices[0].text

        stopped = await client.completions.create(
            model="m", prompt="1, 2, 3, 4,", max_tokens=40, temperature=0, stop=["8, 9"]
        )
        assert stopped.choices[0].text == " 5, 6, 7, " and stopped.choices[0].finish_reason == "stop"

        seeded = [
            (await client.completions.create(model="m", prompt="Once", max_tokens=8, temperature=1, seed=seed))
            .choices[0]
            .text
            for seed in (7, 7, 8)
        ]
        assert seeded[0] == seeded[1] != seeded[2]


async def test_a_cache_salt_keeps_a_prompt_apart(quick_line: Line) -> None:
    async with quick_line.openai() as client:
        answers = [
            await client.completions.create(
                model="m", prompt="page " * 40, max_tokens=4, temperature=0, extra_body={"cache_salt": salt}
            )
            for salt in (None, "mine", "mine", "yours")
        ]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert [count > 0 for count in cached] == [False, False, True, False]
    assert len({answer.choices[0].text for answer in answers}) == 1


async def test_tools_that_the_models_template_does_not_show_change_nothing(line: Line) -> None:
    async with line.openai() as client:
        tools = [{"type": "function", "function": {"name": "capital_of", "parameters": {"type": "object"}}}]
        plain, asked = [
            await client.chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=8, **options)
            for options in ({}, {"tools": tools, "tool_choice": "auto"})
        ]
    assert asked.choices[0].message.content == plain.choices[0].message.content
    assert asked.usage.prompt_tokens == plain.usage.prompt_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "capital_of"}}])
async def test_tools_that_must_be_called_are(quick_line: Line, choice: Any) -> None:
    """Tools are called by a model that was never trained to."""
    parameters = {
        "type": "object",
        "properties": {"country": {"type": "string", "maxLength": 20}},
        "required": ["country"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "capital_of", "parameters": parameters, "strict": True}}]
    async with quick_line.openai() as client:
        answer = await client.chat.completions.create(
            model="m", messages=QUESTION, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=64
        )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "capital_of"
    assert list(json.loads(call.function.arguments)) == ["country"]


async def test_words_and_tokens_that_are_ruled_out_do_not_appear(line: Line) -> None:
    async with line.openai() as client, http_client() as http:
        prompt = "The capital of France is"
        more = {"bad_words": ["Paris", "the"]}
        answer = await client.completions.create(model="m", prompt=prompt, max_tokens=8, temperature=0, extra_body=more)
        assert "Paris" not in answer.choices[0].text and " the" not in answer.choices[0].text
        ids = [
            (await http.post(f"{line.base_url}/tokenize", json={"prompt": text})).json()["tokens"][-1] for text in "abc"
        ]
        answer = await client.completions.create(
            model="m", prompt=prompt, max_tokens=6, seed=3, extra_body={"allowed_token_ids": ids}
        )
        assert {*answer.choices[0].text} <= {*"abc"} and len(answer.choices[0].text) == 6


async def test_openai_errors(line: Line) -> None:
    async with line.openai() as client:
        with pytest.raises(openai.NotFoundError, match="nobody"):
            await client.chat.completions.create(model="nobody", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="4096") as too_long:
            await client.completions.create(model="m", prompt="word " * 5000)
        assert "5000" in str(too_long.value) or "5001" in str(too_long.value)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="m", messages=QUESTION, temperature=-1)
        with pytest.raises(openai.BadRequestError, match="start the server with --runner pooling"):
            await client.embeddings.create(model="m", input="a")


async def test_grpc_text_level(line: Line) -> None:
    async with line.inference() as stub:
        models = await stub.ListModels(inference_pb2.ListModelsRequest())
        assert [(m.id, m.max_model_len) for m in models.models] == [("m", 4096)]
        chat = inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", content=QUESTION[0]["content"])]
        )
        request = inference_pb2.GenerateRequest(
            chat=chat, sampling_params=common_pb2.SamplingParams(temperature=0, max_tokens=32)
        )
        responses = [response async for response in stub.Generate(request)]
        assert "Paris" in "".join(response.text for response in responses)
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP

        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text="Hello 🌍, 世界"))
        text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
        assert text.text == "Hello 🌍, 世界"

        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.Generate(inference_pb2.GenerateRequest(model="nobody", text="x")):
                pass
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


async def test_grpc_token_level(line: Line) -> None:
    async with line.inference() as text_stub, line.scheduler() as stub:
        prompt = (await text_stub.Tokenize(inference_pb2.TokenizeRequest(text="The capital of France is"))).token_ids
        request = scheduler_pb2.TokenRequest(
            prompt_token_ids=prompt, sampling_params=common_pb2.SamplingParams(temperature=0, max_tokens=4)
        )
        responses = [r async for r in stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(request=request))]
        output = [token for response in responses for token in response.token_ids]
        text = (await text_stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=output))).text
    assert "Paris" in text and len(output) == 4
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("tokenizer", "pagewire.v1.InferenceService"),
        ("scheduler", "pagewire.v1.SchedulerService"),
        ("executor", "pagewire.v1.ExecutorService"),
    ],
)
async def test_reflection(quick_line: Line, service: str, name: str) -> None:
    async with rpc.channel(quick_line.address(service)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = {s.name async for answer in call for s in answer.list_services_response.service}
    assert {name, "grpc.health.v1.Health"} <= listed


async def test_openapi_names_every_route(quick_line: Line) -> None:
    async with http_client() as http:
        document = (await http.get(f"{quick_line.base_url}/openapi.json")).json()
    wanted = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/v1/embeddings"}
    wanted |= {f"{version}/{name}" for version in ("", "/v1") for name in ("score", "rerank", "classify", "pooling")}
    assert wanted | {"/health", "/livez", "/readyz", "/version", "/metrics"} <= set(document["paths"])
