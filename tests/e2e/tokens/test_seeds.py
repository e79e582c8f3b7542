"""The same seeds give the same choices, whatever else happens."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.line import Line
from tests.e2e.prompts import PROMPTS
from tests.e2e.tokens.test_parity import flags, preemptions

N = 3
SEED = 41
PROMPT = PROMPTS[15]
NUM_BLOCKS = 14  # fewer than all at once need, and enough for any one


@pytest.fixture(scope="module")
def line(any_line: Line) -> Line:
    """The quick line; the full sweep repeats the module on the default model."""
    return any_line


async def choices(line: Line, prompt: str = PROMPT, n: int = N, seed: int = SEED) -> list[str]:
    async with line.openai() as client:
        answer = await client.completions.create(
            model="m", prompt=prompt, n=n, seed=seed, max_tokens=32, temperature=0.9, extra_body={"ignore_eos": True}
        )
    return [choice.text for choice in answer.choices]


async def beside_others(line: Line) -> list[str]:
    """Returns the choices of a request in the middle of many."""
    many = (choices(line, PROMPTS[index], n=2, seed=index) for index in range(10))
    return (await asyncio.gather(choices(line), *many))[0]


@pytest.fixture(scope="module")
def undisturbed(line: Line) -> list[str]:
    return asyncio.run(choices(line))


async def test_choices_differ_and_each_is_that_of_its_own_seed(line: Line, undisturbed: list[str]) -> None:
    assert len(set(undisturbed)) == N
    alone = await asyncio.gather(*(choices(line, n=1, seed=SEED + index) for index in range(N)))
    assert [text for (text,) in alone] == undisturbed


async def test_in_another_batch_and_from_the_prefix_cache(line: Line, undisturbed: list[str]) -> None:
    assert await beside_others(line) == undisturbed
    assert await choices(line) == undisturbed


def test_after_a_restart_and_with_preemptions(line: Line, undisturbed: list[str]) -> None:
    with flags(line, "executor", "--num-gpu-blocks-override", str(NUM_BLOCKS)):
        assert asyncio.run(choices(line)) == undisturbed
        before = asyncio.run(preemptions(line))
        assert asyncio.run(beside_others(line)) == undisturbed
        assert asyncio.run(preemptions(line)) > before
