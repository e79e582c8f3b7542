"""No request is lost when a service dies: streams pause, go on where they were, and say nothing twice."""

import asyncio
from dataclasses import dataclass

import pytest

from tests.e2e.line import Line
from tests.e2e.prompts import PROMPTS

NUM_STREAMS = 16
MAX_TOKENS = 96


@dataclass(frozen=True)
class Outcome:
    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


class Progress:
    """How far all streams together have come; wakes who waits for it."""

    def __init__(self) -> None:
        self.chunks = 0
        self._changed = asyncio.Condition()

    async def advance(self) -> None:
        async with self._changed:
            self.chunks += 1
            self._changed.notify_all()

    async def reach(self, chunks: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.chunks >= chunks)


async def stream(line: Line, number: int, progress: Progress) -> Outcome:
    """Even streams are greedy, odd ones sampled with a seed; every fourth reports what a long prompt gives."""
    prompt = PROMPTS[number % 18] if number % 4 else PROMPTS[16] * (1 + number % 3)
    text, finish_reason, usage = "", None, None
    async with line.openai() as client:
        async for chunk in await client.completions.create(
            model="m",
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0.8 if number % 2 else 0,
            seed=1000 + number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.text
                finish_reason = choice.finish_reason or finish_reason
            await progress.advance()
    assert usage is not None
    return Outcome(text, finish_reason, usage.prompt_tokens, usage.completion_tokens)


async def run_streams(line: Line, victim: str | None = None, kills: tuple[int, ...] = ()) -> list[Outcome]:
    """All streams at once; the victim is killed and started again each time that many chunks have come in all."""
    progress = Progress()
    tasks = [asyncio.create_task(stream(line, number, progress)) for number in range(NUM_STREAMS)]
    for chunks in kills:
        assert victim is not None
        await progress.reach(chunks)
        line.kill(victim)
        await asyncio.sleep(0.3)
        assert not all(task.done() for task in tasks), "nothing was left to lose"
        line.start(victim)
    return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def undisturbed(line: Line) -> list[Outcome]:
    return asyncio.run(run_streams(line))


@pytest.mark.parametrize("victim", ["executor", "scheduler", "tokenizer"])
async def test_streams_survive_the_death_of_a_service(line: Line, undisturbed: list[Outcome], victim: str) -> None:
    outcomes = await run_streams(line, victim, kills=(100, 600))
    assert outcomes == undisturbed
    assert all(o.completion_tokens == MAX_TOKENS and o.finish_reason == "length" for o in outcomes)
    await line.wait_ready()
    load = await line.wait_idle()
    assert load.num_free_blocks == load.num_blocks


async def test_streams_survive_the_death_of_all_three(line: Line, undisturbed: list[Outcome]) -> None:
    progress = Progress()
    tasks = [asyncio.create_task(stream(line, number, progress)) for number in range(NUM_STREAMS)]
    for chunks, victim in ((80, "tokenizer"), (250, "executor"), (400, "scheduler")):
        await progress.reach(chunks)
        line.restart(victim)
    assert await asyncio.gather(*tasks) == undisturbed
    await line.wait_ready()


async def test_requests_are_judged_by_the_executor_that_runs_them(line: Line) -> None:
    """Not by the last one: a request that comes while a larger one starts may have all of its room."""
    flags = line.flags["executor"]
    line.restart("executor", *flags, "--num-gpu-blocks-override", "4")
    await line.wait_ready()
    async with line.openai() as client:
        for _ in range(100):
            if [model.max_model_len async for model in client.models.list()] == [4 * 16]:  # type: ignore[attr-defined]
                break
            await asyncio.sleep(0.1)
        line.restart("executor", *flags)
        fits, grows = await asyncio.gather(
            client.completions.create(model="m", prompt=[5] * 100, max_tokens=20, extra_body={"ignore_eos": True}),
            client.completions.create(model="m", prompt=[5] * 40, max_tokens=60, extra_body={"ignore_eos": True}),
        )
    assert fits.usage is not None and grows.usage is not None
    assert (fits.usage.completion_tokens, grows.usage.completion_tokens) == (20, 60)
    await line.wait_ready()
