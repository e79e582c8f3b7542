"""Errors of requests: codes, fields and remedies."""

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

from pagewire.v1 import common_pb2, inference_pb2
from tests.services.tokenizer.service.answers import TEXT, code_of, details_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no prompt"),
        ({"text": ""}, "the prompt is empty"),
        ({"text": "x", "truncate_prompt_tokens": 0}, r"truncate_prompt_tokens is 0; it must be -1 or within 1\.\.50"),
        ({"text": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
        ({"text": "x", "truncate_prompt_tokens": 51}, "truncate_prompt_tokens is 51"),
        (
            {"text": "x", "truncate_prompt_tokens": -1, "sampling_params": {"max_tokens": 50}},
            "max_tokens is 50 and the model takes 50 tokens",
        ),
        ({"token_ids": {"ids": [1] * 2_000_001}}, "the prompt has 2000001 tokens; at most 2000000"),
        ({"token_ids": {"ids": [1, -2]}}, "token_ids.ids contains -2"),
        ({"text": "x", "stop": ["a", ""]}, "empty string"),
        ({"text": "x", "bad_words": ["a", ""]}, "bad_words contains an empty string"),
        ({"text": "x", "bad_words": ["a"] * 1025}, "bad_words has 1025 words; at most 1024"),
        ({"text": "x", "bad_words": ["w " * 70_000]}, "bad_words have 140000 characters together; at most 131072"),
        (
            {"text": "x", "n": 128, "sampling_params": {"stop_token_ids": [*range(10_000)]}},
            "have 1280000 values in all 128 choices; at most 1000000 are possible",
        ),
        ({"text": "x", "stop": ["a"] * 1025}, "stop has 1025 strings; at most 1024"),
        (
            {"chat": {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ '%99d' % 1 }}"}},
            "--trust-request-chat-template",
        ),
        (
            {
                "chat": {
                    "messages": [{"role": "user", "content": "x"}],
                    "chat_template_kwargs_json": '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
                }
            },
            "chat_template_kwargs is not valid JSON: nested too deeply",
        ),
        ({"chat": inference_pb2.ChatPrompt()}, "at least one message"),
        (
            {
                "chat": inference_pb2.ChatPrompt(
                    messages=[inference_pb2.ChatMessage(role="user", content="x")], chat_template_kwargs_json="[1]"
                )
            },
            "JSON object",
        ),
    ],
)
async def test_bad_requests_say_what_is_wrong(make_line, pool, fields, message) -> None:
    async with make_line(max_model_len=50).running(pool=pool) as line:
        await line.scheduler.until(lambda: line.link.is_available)
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await line.generate(**fields)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert line.scheduler.requests == []


@pytest.mark.parametrize(
    ("template", "message"), [("{% bad %}", "not valid jinja"), (r"{{ '\ud800' }}", "surrogates not allowed")]
)
async def test_a_trusted_clients_template_may_still_be_wrong(make_line, smollm2_gguf, template, message) -> None:
    async with make_line(config={"trust_request_chat_template": True}).running() as line:
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await line.generate(chat={"messages": [{"role": "user", "content": "x"}], "chat_template": template})
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_errors_of_the_scheduler_are_passed_on(make_line, pool) -> None:
    full = common_pb2.RequestError(code=8, message="the queue is full")
    async with make_line(errors={0: full}).running(pool=pool) as line:
        assert await code_of(line.generate(text="x")) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        assert (await line.generate(text="x")).text == TEXT


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"text": "Say", "sampling_params": {"temperature": -1, "top_p": 3}, "stop": ["a", ""]},
            ["stop[1]", "sampling_params.temperature", "sampling_params.top_p"],
        ),
        ({"token_ids": {"ids": [1, -2]}}, ["token_ids.ids"]),
        ({"text": ""}, ["text"]),
        (
            {"chat": {"messages": [{"content": "a"}, {"role": "user", "parts": [{}]}]}},
            ["chat.messages[0].role", "chat.messages[1].parts[0]"],
        ),
        (
            {"chat": {"messages": [{"role": "user"}, {"role": "assistant"}]}, "sampling_params": {"top_p": 3}},
            ["sampling_params.top_p", "chat.messages[0].content"],
        ),
        (
            {"chat": {"messages": [{"role": "user", "parts": [{"text": "a"}, {"image": {"url": "data:,x"}}]}]}},
            ["chat.messages"],
        ),
        ({"text": "Say", "n": 500}, ["n"]),
    ],
)
async def test_statuses_name_every_field_that_is_wrong(make_line, pool, fields, expected) -> None:
    async with make_line().running(pool=pool) as line:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await line.generate(**fields)
    [bad] = details_of(caught.value, BadRequest)
    assert [violation.field for violation in bad.field_violations] == expected
    assert all(violation.description for violation in bad.field_violations)
    [info] = details_of(caught.value, ErrorInfo)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "pagewire")


async def test_what_the_scheduler_refuses_is_named_as_the_client_knows_it(make_line, pool) -> None:
    why = "prompt_token_ids contains 99999; the vocabulary is 0 to 49151"
    error = common_pb2.RequestError(code=3, message=why)
    error.violations.add(field="prompt_token_ids", description=why)
    async with make_line(errors={0: error}).running(pool=pool) as line:
        with pytest.raises(grpc.aio.AioRpcError, match=r"token_ids\.ids contains 99999") as caught:
            await line.generate(token_ids={"ids": [1, 99999]})
    [bad] = details_of(caught.value, BadRequest)
    assert [violation.field for violation in bad.field_violations] == ["token_ids.ids"]


async def test_errors_say_when_to_try_again(make_line, pool) -> None:
    error = common_pb2.RequestError(code=8, message="too many wait")
    async with make_line(errors={0: error}).running(pool=pool) as line:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await line.generate(text="Say")
    assert [info.retry_delay.seconds for info in details_of(caught.value, RetryInfo)] == [1]
    assert not details_of(caught.value, BadRequest)


async def test_a_long_list_of_violations_fits_into_the_trailers(make_line, pool) -> None:
    messages = [{"content": "a"}] * 10_000
    async with make_line().running(pool=pool) as line:
        code, _ = await code_of(line.generate(chat={"messages": messages}))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
