"""Failures during a recovery, while the line drains, and while it is idle."""

import asyncio

import pytest

from tests.e2e.conftest import is_default
from tests.e2e.line import Line
from tests.e2e.prompts import PROMPTS


@pytest.fixture(scope="module")
def line(slow_line: Line) -> Line:
    """The quick line; the full sweep repeats the module on the default model."""
    return slow_line


def max_tokens(line: Line) -> int:
    """Returns what takes a second or so: longer than a service is away, and less than a gateway drains."""
    return 48 if is_default(line) else 200


async def complete(line: Line, number: int, begun: asyncio.Event, at_most: int = 200) -> str:
    text = ""
    async with line.openai() as client:
        async for chunk in await client.completions.create(
            model="m",
            prompt=PROMPTS[16],
            max_tokens=min(max_tokens(line), at_most),
            temperature=0.8,
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            text += chunk.choices[0].text
            begun.set()
    return text


async def started(line: Line) -> list[asyncio.Task[str]]:
    begun = [asyncio.Event() for _ in range(2)]
    tasks = [asyncio.create_task(complete(line, number, event)) for number, event in enumerate(begun)]
    await asyncio.gather(*(event.wait() for event in begun))
    assert not all(task.done() for task in tasks), "nothing was left to lose"
    return tasks


@pytest.fixture(scope="module")
def undisturbed(line: Line) -> list[str]:
    async def run() -> list[str]:
        return await asyncio.gather(*await started(line))

    return asyncio.run(run())


async def test_an_executor_dies_again_as_it_recomputes(line: Line, undisturbed: list[str]) -> None:
    tasks = await started(line)
    lost = line.log("scheduler").count("lost the executor")
    line.restart("executor")
    async with asyncio.timeout(60):
        while line.log("scheduler").count("lost the executor") == lost:  # noqa: ASYNC110 - the state of a service
            await asyncio.sleep(0.005)
        while not (await line.load()).num_running:  # noqa: ASYNC110 - the state of a service
            await asyncio.sleep(0.005)
    line.restart("executor")
    assert await asyncio.gather(*tasks) == undisturbed
    await line.wait_ready()


async def test_a_tokenizer_dies_as_the_scheduler_comes_back(line: Line, undisturbed: list[str]) -> None:
    tasks = await started(line)
    line.restart("scheduler")
    line.restart("tokenizer")
    await line.wait_ready("scheduler")
    line.restart("scheduler")
    assert await asyncio.gather(*tasks) == undisturbed
    await line.wait_ready()


async def test_a_gateway_that_drains_outlives_its_neighbour(line: Line, undisturbed: list[str]) -> None:
    tasks = await started(line)
    line.processes["gateway"].terminate()
    line.restart("executor")
    assert await asyncio.gather(*tasks) == undisturbed
    await asyncio.to_thread(line.processes["gateway"].wait, 30)
    line.start("gateway")
    await line.wait_ready()


@pytest.mark.parametrize("victim", ["executor", "scheduler", "tokenizer"])
async def test_a_death_while_idle_costs_no_request(line: Line, undisturbed: list[str], victim: str) -> None:
    line.restart(victim)
    text = await complete(line, 0, asyncio.Event(), at_most=24)
    assert text and undisturbed[0].startswith(text)
    await line.wait_ready()
