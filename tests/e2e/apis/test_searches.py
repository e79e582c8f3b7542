"""Several outputs of a prompt through the whole line: beam search is transformers' own, and survives what dies."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.e2e.conftest import Reference, is_default
from tests.e2e.line import Line
from tests.e2e.prompts import PROMPTS
from tests.sweep import IS_FULL

WIDTH = 3
CHOSEN = [PROMPTS[index] for index in ((3, 11) if IS_FULL else (11,))]


@pytest.fixture(scope="module")
def line(slow_line: Line) -> Line:
    """The quick line; the full sweep repeats the module on the default model."""
    return slow_line


def num_tokens(line: Line) -> int:
    """Returns the length of a search that goes on for long enough to lose a service twice."""
    return 16 if is_default(line) else 96


@pytest.fixture(scope="module")
def expected(line: Line, reference: Reference) -> list[list[str]]:
    """The outputs of transformers' generate() for each prompt, without end tokens."""
    tokenizer, model = reference
    found = []
    for prompt in CHOSEN:
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=num_tokens(line),
                do_sample=False,
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
            )
        new = output[:, inputs["input_ids"].shape[1] :]
        found.append(tokenizer.batch_decode(new, skip_special_tokens=True))
    return found


async def search(line: Line, prompt: str) -> list[str]:
    async with line.openai() as client:
        answer = await client.completions.create(
            model="m", prompt=prompt, n=WIDTH, max_tokens=num_tokens(line), extra_body={"use_beam_search": True}
        )
    return [choice.text for choice in answer.choices]


async def test_beams_are_those_of_transformers(line: Line, expected: list[list[str]]) -> None:
    assert list(await asyncio.gather(*(search(line, prompt) for prompt in CHOSEN))) == expected


async def test_a_search_survives_the_deaths_of_services(line: Line, expected: list[list[str]]) -> None:
    """Requests for a token go on without an executor; the search begins again without the tokenizer."""
    tasks = [asyncio.create_task(search(line, prompt)) for prompt in CHOSEN]
    for victim in ("executor", "tokenizer"):
        before = await num_generated(line)
        async with asyncio.timeout(60):
            while await num_generated(line) < before + 10:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert not all(task.done() for task in tasks), "nothing was left to lose"
        line.restart(victim)
    assert await asyncio.gather(*tasks) == expected
    await line.wait_ready()
    load = await line.wait_idle()
    assert load.num_free_blocks == load.num_blocks


async def num_generated(line: Line) -> float:
    return (await line.metrics())['pagewire:generation_tokens_total{service="scheduler"}']
