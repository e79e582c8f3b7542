"""Chat completions, driven by the official client."""

import json

import httpx
import openai

from tests.gateway.fake_tokenizer import NUM_CACHED_TOKENS, FakeTokenizer, expected_text

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = "<user>hi<assistant>"


async def test_whole_answer(ai: openai.AsyncOpenAI) -> None:
    answer = await ai.chat.completions.create(model="fake", messages=MESSAGES, seed=7, max_completion_tokens=10)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected_text(PROMPT, 7, 10)
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == len(PROMPT) + 10
    assert answer.usage.prompt_tokens_details.cached_tokens == NUM_CACHED_TOKENS


async def test_stream_is_what_the_official_client_expects(ai: openai.AsyncOpenAI) -> None:
    stream = await ai.chat.completions.create(
        model="fake", messages=MESSAGES, seed=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    role, *deltas, finish, usage = chunks
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert role.choices[0].delta.role == "assistant"
    assert role.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content for chunk in deltas) == expected_text(PROMPT, 7)
    assert len(deltas) > 2
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in [role, *deltas])
    assert finish.choices[0].finish_reason == "length"
    assert finish.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == 24
    assert usage.usage.prompt_tokens == len(PROMPT)


async def test_stream_without_options_has_no_usage(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": MESSAGES, "stream": True, "max_tokens": 3, "seed": 1}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events)
    assert json.loads(events[-1])["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip


async def test_continuous_usage_grows_up_to_the_total(ai: openai.AsyncOpenAI) -> None:
    stream = await ai.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        stream=True,
        max_tokens=8,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 8


async def test_choices_differ_by_seed_and_repeat_with_it(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    answer = await ai.chat.completions.create(model="fake", messages=MESSAGES, seed=5, n=3, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [expected_text(PROMPT, seed, 12) for seed in (5, 6, 7)]
    # The prompt counts once.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 36)


async def test_choices_are_interleaved_in_one_stream(ai: openai.AsyncOpenAI) -> None:
    stream = await ai.chat.completions.create(model="fake", messages=MESSAGES, seed=5, n=2, stream=True)
    texts, order, finished = ["", ""], [], []
    async for chunk in stream:
        for choice in chunk.choices:
            order.append(choice.index)
            texts[choice.index] += choice.delta.content or ""
            finished += [choice.index] if choice.finish_reason else []
    assert texts == [expected_text(PROMPT, 5), expected_text(PROMPT, 6)]
    assert sorted(finished) == [0, 1]
    assert order != sorted(order)


async def test_greatest_seed_wraps_around(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    await ai.chat.completions.create(model="fake", messages=MESSAGES, seed=2**63 - 1, n=2)
    assert [request.sampling_params.seed for request in fake.received] == [2**63 - 1, -(2**63)]


async def test_a_seed_is_drawn_when_none_is_given(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    for _ in range(2):
        await ai.chat.completions.create(model="fake", messages=MESSAGES)
    first, second = (request.sampling_params for request in fake.received)
    assert first.HasField("seed") and second.HasField("seed")
    assert first.seed != second.seed


async def test_logprobs(ai: openai.AsyncOpenAI) -> None:
    create = ai.chat.completions.create
    answer = await create(model="fake", messages=MESSAGES, seed=1, max_tokens=6, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert bytes(content[0].bytes).decode() == content[0].token
    assert [(other.token, other.logprob) for other in content[0].top_logprobs] == [("a", -1.0), ("b", -9999.0)]

    stream = await create(model="fake", messages=MESSAGES, seed=1, max_tokens=6, logprobs=True, stream=True)
    streamed = []
    async for chunk in stream:
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [(entry.token, entry.top_logprobs) for entry in streamed] == [(entry.token, []) for entry in content]


async def test_stop_string_is_named(ai: openai.AsyncOpenAI) -> None:
    text = expected_text(PROMPT, 3)
    stop = text[10:12]
    answer = await ai.chat.completions.create(model="fake", messages=MESSAGES, seed=3, stop=[stop, "\x00"])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop


async def test_conversation_reaches_the_tokenizer(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    earlier = await ai.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2)
    await ai.chat.completions.create(
        model="fake",
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c", "name": "Ann"},
            # What a client keeps of an answer comes back with all its nulls.
            earlier.choices[0].message.model_dump(),
            {"role": "assistant", "content": "d"},
        ],
        extra_body={
            "continue_final_message": True,
            "add_special_tokens": True,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    chat = fake.received[-1].chat
    assert [part.text for part in chat.messages[0].parts] == ["a", "b"]
    assert (chat.messages[1].role, chat.messages[1].content, chat.messages[1].name) == ("user", "c", "Ann")
    assert chat.messages[2].content == earlier.choices[0].message.content
    assert chat.continue_final_message and not chat.add_generation_prompt
    assert json.loads(chat.chat_template_kwargs_json) == {"enable_thinking": False}
    assert fake.received[-1].add_special_tokens


async def test_token_ids_on_request(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": MESSAGES, "seed": 1, "max_tokens": 5, "return_token_ids": True}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    expected = [ord(c) for c in expected_text(PROMPT, 1, 5)]
    assert answer["prompt_token_ids"] == [ord(c) for c in PROMPT]
    assert answer["choices"][0]["token_ids"] == expected

    response = await client.post("/v1/chat/completions", json=body | {"stream": True})
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert chunks[0]["prompt_token_ids"] == [ord(c) for c in PROMPT]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == expected


async def test_images_reach_the_tokenizer(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    parts = [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}},
    ]
    await ai.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}], max_tokens=1)
    [message] = fake.received[0].chat.messages
    assert [part.WhichOneof("part") for part in message.parts] == ["text", "image", "image"]
    assert [part.image.url for part in message.parts[1:]] == ["data:image/png;base64,AA==", "https://example.com/x.png"]


async def test_a_chat_with_images_is_resubmitted_as_it_was(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    """Token ids cannot say what an image shows."""
    fake.break_at = 3
    parts = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
    body = {"messages": [{"role": "user", "content": parts}], "seed": 1, "max_tokens": 8}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    first, second = fake.submissions
    assert first.request.chat == second.request.chat
    assert second.resume_token_ids and not second.request.HasField("token_ids")


async def test_choices_of_a_large_request_have_a_bound(client: httpx.AsyncClient) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:," + "x" * 2_000_000}}]
    body = {"messages": [{"role": "user", "content": parts}], "n": 100}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


async def test_turns_of_earlier_answers_are_taken_as_clients_send_them(
    client: httpx.AsyncClient, fake: FakeTokenizer
) -> None:
    def call(arguments: object) -> dict[str, object]:
        return {"id": "a", "function": {"name": "f", "arguments": arguments, "strict": None}, "extra": None}

    said_nothing: list[dict[str, object]] = [{}, {"content": None}, {"content": []}, {"reasoning": "Hm."}]
    turns = [
        *({"role": "assistant"} | said for said in said_nothing),
        *({"role": "assistant", "content": None, "tool_calls": [call(one)]} for one in ('{"a', {"a": 1}, None)),
        {"role": "tool", "tool_call_id": "a", "content": None},
        {"role": "tool", "tool_call_id": "a", "content": [], "is_error": None},
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}], "annotations": None},
    ]
    answer = await client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 1, "conversation": None})
    assert answer.status_code == 200, answer.text
    received = fake.received[-1].chat.messages
    assert [call.arguments for turn in received for call in turn.tool_calls] == ['{"a', '{"a": 1}', "{}"]
    assert [turn.HasField("content") or bool(turn.parts) for turn in received] == [False] * 9 + [True]
