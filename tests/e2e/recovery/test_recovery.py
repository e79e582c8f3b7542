"""No request is lost when a service dies: streams pause, go on where they were, and say nothing twice."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
from openai import BadRequestError, InternalServerError

from tests.e2e.line import Line
from tests.e2e.prompts import PROMPTS

T = TypeVar("T")

NUM_STREAMS = 8  # one of every kind
MAX_TOKENS = 200
# What every fourth stream asks for beside the others.
RESTRICTED = {"bad_words": ["the", "and", "of"], "truncate_prompt_tokens": 12, "cache_salt": "mine"}
# What every eighth has to write, longer than it may be.
STEP = {"type": "object", "properties": {"step": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}}}
STEPS = {"type": "array", "items": STEP | {"required": ["step", "n"]}, "minItems": 40}
STRUCTURED = {"structured_outputs": {"json": STEPS}}
# Further fields of another eighth of the requests.
SCORED = {"echo": True, "logprobs": 1}


@pytest.fixture(scope="module")
def line(slow_line: Line) -> Line:
    """The quick line; the full sweep repeats the module on the default model."""
    return slow_line


@dataclass(frozen=True)
class Outcome:
    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    tokens: tuple[str, ...]  # those with log probabilities


class Progress:
    """Counts the chunks of all streams together; wakes tasks that wait for a count."""

    def __init__(self) -> None:
        self.chunks = 0
        self._changed = asyncio.Condition()

    async def advance(self) -> None:
        async with self._changed:
            self.chunks += 1
            self._changed.notify_all()

    async def further(self, chunks: int) -> None:
        async with self._changed:
            goal = self.chunks + chunks
            await self._changed.wait_for(lambda: self.chunks >= goal)


async def disturbed(
    line: Line, victims: Sequence[str], read: Callable[[int, Progress], Awaitable[T]], num_streams: int, chunks: int
) -> list[T]:
    """Reads streams at once; each victim is killed after further `chunks` of all streams, and started again.

    A chunk has several tokens when the reader is late, all that are left if it is very late: streams that ended
    before the last death prove nothing, and are read again.
    """
    for _ in range(5):
        progress = Progress()
        tasks = [asyncio.ensure_future(read(number, progress)) for number in range(num_streams)]
        results = asyncio.gather(*tasks)
        some_left = True
        for victim in victims:
            reached = asyncio.ensure_future(progress.further(chunks))
            done, _ = await asyncio.wait((reached, results), timeout=60, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            assert done, f"{progress.chunks} chunks after a minute"
            line.kill(victim)
            await asyncio.sleep(0.3)
            some_left = some_left and not results.done()
            line.start(victim)
        outcomes = await results
        if some_left:
            return outcomes
    pytest.fail("all streams ended before the last death, five times")


async def stream(line: Line, number: int, progress: Progress) -> Outcome:
    """Reads one stream. Even streams are greedy, odd ones sampled with a seed; one in four has a long prompt, one in
    four is RESTRICTED, one in eight STRUCTURED, one SCORED."""
    extra = RESTRICTED if number % 4 == 3 else {5: STRUCTURED, 1: SCORED}.get(number % 8, {})
    prompt = PROMPTS[number % 18] if number % 4 else PROMPTS[16] * (1 + number % 3)
    text, finish_reason, usage, tokens = "", None, None, list[str]()
    async with line.openai() as client:
        async for chunk in await client.completions.create(
            model="m",
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0.8 if number % 2 else 0,
            seed=1000 + number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, **extra},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.text
                tokens += choice.logprobs.tokens if choice.logprobs else ()
                finish_reason = choice.finish_reason or finish_reason
            await progress.advance()
    assert usage is not None
    return Outcome(text, finish_reason, usage.prompt_tokens, usage.completion_tokens, tuple(tokens))


@pytest.fixture(scope="module")
def undisturbed(line: Line) -> list[Outcome]:
    async def read() -> list[Outcome]:
        return await asyncio.gather(*(stream(line, number, Progress()) for number in range(NUM_STREAMS)))

    return asyncio.run(read())


@pytest.mark.parametrize("victim", ["executor", "scheduler", "tokenizer"])
async def test_streams_survive_the_death_of_a_service(line: Line, undisturbed: list[Outcome], victim: str) -> None:
    outcomes = await disturbed(line, (victim, victim), partial(stream, line), NUM_STREAMS, chunks=20)
    assert outcomes == undisturbed
    assert all(o.completion_tokens == MAX_TOKENS and o.finish_reason == "length" for o in outcomes)
    assert all(o.prompt_tokens <= 12 and " the " not in o.text and " of " not in o.text for o in outcomes[3::4])
    assert all(re.match(r'\s*\[\s*\{\s*"step"\s*:\s*"', o.text) for o in outcomes[5::8])
    assert all(len(o.tokens) == o.prompt_tokens + MAX_TOKENS for o in outcomes[1::8])
    await line.wait_ready()
    load = await line.wait_idle()
    assert load.num_free_blocks == load.num_blocks


async def test_streams_survive_the_death_of_all_three(line: Line, undisturbed: list[Outcome]) -> None:
    victims = ("tokenizer", "executor", "scheduler")
    assert await disturbed(line, victims, partial(stream, line), NUM_STREAMS, chunks=20) == undisturbed
    await line.wait_ready()


async def test_a_prompt_is_scored_once_if_the_executor_dies_over_it(line: Line) -> None:
    async def score() -> list[float]:
        async with line.openai() as client:
            answer = await client.completions.create(
                model="m", prompt=PROMPTS[16] * 2, max_tokens=0, echo=True, logprobs=0
            )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None and "".join(logprobs.tokens or ()) == PROMPTS[16] * 2
        return logprobs.token_logprobs[1:]

    undisturbed = await score()
    tasks: list[asyncio.Task[list[float]]] = []
    while not (await line.load()).num_running:
        if all(task.done() for task in tasks):  # they were too quick to be seen
            tasks = [asyncio.create_task(score()) for _ in range(16)]
        await asyncio.sleep(0.002)
    line.restart("executor")
    for scores in await asyncio.gather(*tasks):
        assert scores == pytest.approx(undisturbed, abs=1e-3)


PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}}}
CLOSED = {"required": ["city", "days"], "additionalProperties": False}
PLACES = {"type": "array", "items": PLACE | CLOSED, "minItems": 5, "maxItems": 5}
TRIP = {"type": "object", "properties": {"places": PLACES}, "required": ["places"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "plan", "parameters": TRIP}}


async def required_call(line: Line, _: int, progress: Progress) -> str:
    """Returns the arguments of the call; each chunk counts as progress."""
    arguments = ""
    async with line.openai() as client:
        async for chunk in await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Plan a trip."}],
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=360,
            temperature=0.8,
            seed=5,
            stream=True,
        ):
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                arguments += call.function.arguments or ""
                await progress.advance()
    return arguments


async def test_a_call_that_must_be_survives_the_death_of_all_three(line: Line) -> None:
    undisturbed = await required_call(line, 0, Progress())
    assert len(json.loads(undisturbed)["places"]) == 5
    victims = ("tokenizer", "executor", "scheduler")
    assert await disturbed(line, victims, partial(required_call, line), 1, chunks=10) == [undisturbed]
    await line.wait_ready()


async def test_requests_are_judged_by_the_executor_that_runs_them(line: Line) -> None:
    """Judges requests by the next executor, not by the last one, which had less room: a request may have all of the
    next one's, and a prompt that only the next one can take is to be sent again."""
    flags = line.flags["executor"]
    line.restart("executor", *flags, "--num-gpu-blocks-override", "4")
    await line.wait_ready()
    async with line.openai() as client:

        async def complete(num_prompt_tokens: int, max_tokens: int) -> int:
            prompt, extra = [5] * num_prompt_tokens, {"ignore_eos": True}
            answer = await client.completions.create(model="m", prompt=prompt, max_tokens=max_tokens, extra_body=extra)
            assert answer.usage is not None
            return answer.usage.completion_tokens

        await line.wait_blocks(4)
        with pytest.raises(BadRequestError, match="maximum context length is 64 tokens, but the prompt has 100"):
            await complete(100, 20)
        line.flags["executor"] = flags
        line.kill("executor")
        await line.wait_blocks(0)
        waiting = asyncio.create_task(complete(40, 60))
        with pytest.raises(InternalServerError, match="the last one took prompts of up to 63 tokens"):
            await complete(100, 20)
        line.start("executor")
        assert await waiting == 60
        assert await complete(100, 20) == 20
    await line.wait_ready()
