"""Images through the whole line: from a message of the openai client to what transformers generates."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.line import Line, running_line
from tests.vision_checkpoints import data_uri, image_processor, picture, save_vision_checkpoint

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
    """transformers' greedy tokens."""
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
