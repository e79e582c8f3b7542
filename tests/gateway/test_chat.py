"""Chat completions, driven by the official client."""

import openai

from tests.gateway.fake_tokenizer import NUM_CACHED_TOKENS, expected_text

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
