"""Images through the whole line: from a message of the openai client to what transformers generates."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.line import NO_CERTIFICATES, Line, running_line
from tests.makers.vision_checkpoints import data_uri, encoded, image_processor, picture, save_vision_checkpoint

FAMILY = "qwen2_5_vl"
FLAGS = ["--dtype", "float32", "--num-gpu-blocks-override", "200", "--max-num-batched-tokens", "24"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, sockets: Path) -> Iterator[tuple[Line, Any, Path]]:
    path = tmp_path_factory.mktemp("model")
    model = save_vision_checkpoint(path, FAMILY)
    with running_line(sockets, str(path), executor=FLAGS) as line:
        yield line, model, path


def message(*contents: Any) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": content}
        if isinstance(content, str)
        else {"type": "image_url", "image_url": {"url": data_uri(content), "detail": "auto"}}
        for content in contents
    ]
    return {"role": "user", "content": parts}


async def ask(line: Line, *contents: Any, num_tokens: int = 12) -> Any:
    return await line.openai().chat.completions.create(
        model="m",
        messages=[message(*contents)],
        max_tokens=num_tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


@torch.inference_mode()
def expected(model: Any, path: Path, num_tokens: int, *contents: Any) -> list[int]:
    """The greedy tokens of transformers."""
    tokenizer, pictures = AutoTokenizer.from_pretrained(path), [c for c in contents if not isinstance(c, str)]
    inputs = dict(image_processor(FAMILY)(pictures, return_tensors="pt")) if pictures else {}
    grids = iter(inputs.get("image_grid_thw", ()))
    texts = [
        content
        if isinstance(content, str)
        else f"<|vision_start|>{'<|image_pad|>' * int(next(grids).prod() // 4)}<|vision_end|>"
        for content in contents
    ]
    input_ids = tokenizer(f"user: {''.join(texts)}\nassistant:", return_tensors="pt")["input_ids"]
    image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        mm_token_type_ids=(input_ids == image_token_id).int(),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **inputs,
    )
    return output[0, input_ids.shape[1] :].tolist()


async def test_answers_are_those_of_transformers(served: tuple[Line, Any, Path]) -> None:
    """One image, two, none, at once and in chunks; a broken image ends its own request alone."""
    line, model, path = served
    one, two = picture(1), picture(2, 64, 32)
    asked = [("What is ", one, "?"), ("Compare ", one, " with ", two, " please"), ("Say hello",)]
    broken = message("a", one)
    broken["content"][1]["image_url"]["url"] = "data:image/png;base64,aGVsbG8="
    *answers, refused = await asyncio.gather(
        *(ask(line, *contents) for contents in asked),
        line.openai().chat.completions.create(model="m", messages=[broken]),
        return_exceptions=True,
    )
    assert isinstance(refused, openai.BadRequestError)
    assert "image 1 of 1 cannot be read: it is none of PNG" in refused.message
    for contents, answer in zip(asked, answers, strict=True):
        assert answer.choices[0].token_ids == expected(model, path, 12, *contents)
    # The same image is found in the prefix cache; another one of the same size, and so of the same tokens, is not.
    again = await ask(line, *asked[0])
    assert again.choices[0].token_ids == answers[0].choices[0].token_ids
    other = await ask(line, "What is ", picture(3), "?")
    assert other.usage.prompt_tokens == again.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens > 16 >= other.usage.prompt_tokens_details.cached_tokens
    assert other.choices[0].token_ids == expected(model, path, 12, "What is ", picture(3), "?")


@pytest.mark.slow
async def test_a_request_with_an_image_outlives_services(served: tuple[Line, Any, Path]) -> None:
    line, model, path = served
    contents = ("Describe ", picture(4, 60, 60), " at length")
    stream = await line.openai().chat.completions.create(
        model="m",
        messages=[message(*contents)],
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    token_ids: list[int] = []
    to_restart = {1: "executor", 50: "tokenizer"}
    async for chunk in stream:
        for choice in chunk.choices:
            token_ids += getattr(choice, "token_ids", None) or []
        due = [count for count in to_restart if len(token_ids) >= count]
        if due:
            line.restart(to_restart.pop(due[0]))
    assert not to_restart
    assert token_ids == expected(model, path, 400, *contents)


async def test_other_apis_show_the_model_the_same(served: tuple[Line, Any, Path]) -> None:
    """Requests to /v1/messages and /v1/responses have a prompt of as many tokens, of which all but the last page come
    from the chat's cache (in which images count by their pixels), and the text of the same tokens."""
    line, model, path = served
    contents = ("What is ", picture(5), " and ", picture(6, 64, 32), "? Say it at length.")
    chat = await ask(line, *contents)
    assert chat.choices[0].token_ids == expected(model, path, 12, *contents)
    tokens, text = chat.usage.prompt_tokens, chat.choices[0].message.content
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    async with line.openai() as ai:
        parts = [
            {"type": "input_text", "text": one}
            if isinstance(one, str)
            else {"type": "input_image", "image_url": data_uri(one), "detail": "auto"}
            for one in contents
        ]
        given: Any = [{"role": "user", "content": parts}]
        response = await ai.responses.create(model="m", input=given, max_output_tokens=12, extra_body=greedy)
    async with anthropic.AsyncAnthropic(
        base_url=line.base_url,
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES),
    ) as claude:
        blocks: list[Any] = [
            {"type": "text", "text": one}
            if isinstance(one, str)
            else {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(one)}}
            for one in contents
        ]
        asked: list[Any] = [{"role": "user", "content": blocks}]
        message = await claude.messages.create(model="m", messages=asked, max_tokens=12, extra_body={"temperature": 0})
    assert response.usage is not None
    cached = (tokens - 1) // 16 * 16
    assert (response.output_text, response.usage.input_tokens) == (text, tokens)
    assert response.usage.input_tokens_details.cached_tokens == cached
    assert (message.content[0].text, message.stop_reason) == (text, "max_tokens")  # no end token among them
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (tokens - cached, cached)


def base64_of(image: Any) -> str:
    return base64.b64encode(encoded(image)).decode()
