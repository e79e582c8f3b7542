"""The line's greedy tokens and the log probabilities of its prompts are transformers' own, however the scheduler
arranges the work."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from pagewire.v1 import common_pb2, inference_pb2
from tests.e2e.conftest import Reference, is_default
from tests.e2e.line import Line
from tests.e2e.prompts import PROMPTS

NEW_TOKENS = 32
# Those of the quick line: one token, English, Chinese, emoji, a chat, code, and a prompt of several chunks.
SOME = (0, 2, 7, 9, 15, 17, 18)
GREEDY = common_pb2.SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


@dataclass(frozen=True)
class Expected:
    prompt: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    # Of the prompt's tokens from the second on; the highest three behind each token but the last.
    prompt_logprobs: list[float]
    highest: list[list[float]]


def expectation(reference: Reference, prompt: str, answer: list[int]) -> Expected:
    """Returns what transformers makes of a prompt, and its greedy continuation, end-of-sequence token included.

    One pass over the prompt and `answer` has transformers' choice behind each of their tokens. Greedy answers are these
    choices; any other differs from them at its first wrong token, or in length.
    """
    tokenizer, model = reference
    ids = tokenizer(prompt)["input_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([ids + answer])).logits[0]
    choices = logits[len(ids) - 1 :].argmax(-1)[:NEW_TOKENS].tolist()
    if (end := model.generation_config.eos_token_id) in choices:
        choices = choices[: choices.index(end) + 1]
    logprobs = logits[: len(ids) - 1].log_softmax(-1)
    own, highest = logprobs.gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0], logprobs.topk(3).values
    return Expected(prompt, ids, choices, own.tolist(), highest.tolist())


@pytest.fixture(scope="module")
def line(any_line: Line) -> Line:
    """The quick line; the full sweep repeats the module on the default model, with all prompts."""
    return any_line


@pytest.fixture(scope="module")
def prompts(line: Line) -> list[str]:
    return PROMPTS if is_default(line) else [PROMPTS[index] for index in SOME]


@pytest.fixture(scope="module")
def expected(reference: Reference, line: Line, prompts: list[str]) -> list[Expected]:
    answers = asyncio.run(
        generate(line, [inference_pb2.GenerateRequest(text=p, sampling_params=GREEDY) for p in prompts])
    )
    return [expectation(reference, p, list(a.token_ids)) for p, a in zip(prompts, answers, strict=True)]


async def generate(line: Line, prompts: list[inference_pb2.GenerateRequest]) -> list[inference_pb2.GenerateResponse]:
    """Every response of each request folded into one, all requests at the same time."""
    async with line.inference() as stub:

        async def one(request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
            total = inference_pb2.GenerateResponse()
            async for response in stub.Generate(request, timeout=250):
                total.MergeFrom(response)
            return total

        return await asyncio.gather(*(one(request) for request in prompts))


def requests(expected: list[Expected], num_prompt_logprobs: int | None = None) -> list[inference_pb2.GenerateRequest]:
    greedy = common_pb2.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, prompt_logprobs=num_prompt_logprobs)
    return [inference_pb2.GenerateRequest(text=e.prompt, sampling_params=greedy) for e in expected]


def check(expected: list[Expected], responses: list[inference_pb2.GenerateResponse]) -> None:
    for wanted, got in zip(expected, responses, strict=True):
        assert list(got.prompt_token_ids) == wanted.prompt_token_ids
        assert list(got.token_ids) == wanted.output_token_ids, wanted.prompt[:60]
        assert got.usage.prompt_tokens == len(wanted.prompt_token_ids)
        assert got.usage.completion_tokens == len(wanted.output_token_ids)


def check_scores(expected: list[Expected], responses: list[inference_pb2.GenerateResponse]) -> None:
    """Checks responses that have three alternatives to each of the prompt's tokens, as `check` does others."""
    check(expected, responses)
    for wanted, got in zip(expected, responses, strict=True):
        reported, count = got.prompt_logprobs, len(wanted.prompt_token_ids) - 1
        assert list(reported.logprobs.token_ids[::4]) == wanted.prompt_token_ids[1:], "once, and all"
        assert len(reported.text_offsets) == 1 + count and reported.text == wanted.prompt
        assert list(reported.logprobs.logprobs[::4]) == pytest.approx(wanted.prompt_logprobs, abs=2e-3)
        for place, highest in enumerate(wanted.highest):
            assert list(reported.logprobs.logprobs[4 * place + 1 : 4 * place + 4]) == pytest.approx(highest, abs=2e-3)


@contextmanager
def flags(line: Line, service: str, *more: str) -> Iterator[None]:
    """The line with one service restarted under further flags, and as it was afterwards."""
    before = line.flags.get(service, [])
    line.restart(service, *before, *more)
    try:
        asyncio.run(line.wait_ready())
        yield
    finally:
        line.flags[service] = before
        line.restart(service)
        asyncio.run(line.wait_ready())


def test_prompts_cover_lengths_from_one_token_on(expected: list[Expected]) -> None:
    lengths = sorted(len(e.prompt_token_ids) for e in expected)
    assert lengths[0] == 1
    assert lengths[-1] >= (1900 if len(expected) == len(PROMPTS) else 400)


async def test_alone(line: Line, expected: list[Expected]) -> None:
    for wanted, request in zip(expected, requests(expected), strict=True):
        check([wanted], await generate(line, [request]))


async def test_batched_and_from_the_prefix_cache(line: Line, expected: list[Expected]) -> None:
    first = await generate(line, requests(expected))
    check(expected, first)
    again = await generate(line, requests(expected))
    check(expected, again)
    longest = again[-1].usage
    assert longest.cached_tokens > longest.prompt_tokens - 64


async def test_prompt_logprobs_of_what_is_cached(line: Line, expected: list[Expected]) -> None:
    few = expected[::3]
    check(few, await generate(line, requests(few)))
    responses = await generate(line, requests(few, 3))
    check_scores(few, responses)
    assert all(response.usage.cached_tokens == 0 for response in responses)


def test_whole_prompts_without_prefix_cache(line: Line, expected: list[Expected]) -> None:
    longest = max(len(one.prompt_token_ids) for one in expected)
    with (
        flags(line, "executor", "--max-num-batched-tokens", str(longest)),
        flags(line, "scheduler", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"),
    ):
        responses = asyncio.run(generate(line, requests(expected)))
    check(expected, responses)
    assert all(r.usage.cached_tokens == 0 for r in responses)


def test_chunked_prefill_one_step_in_flight(line: Line, expected: list[Expected]) -> None:
    with flags(line, "scheduler", "--max-num-batched-tokens", "96", "--pipeline-depth", "1"):
        check_scores(expected, asyncio.run(generate(line, requests(expected, 3))))


def test_preemption(line: Line, expected: list[Expected]) -> None:
    # Room for any one of them, but as soon as a few run at once not for what they generate: each ends with 3 blocks or
    # more, and is admitted as soon as its prompt's are free.
    num_blocks, block_size = 12, 16
    fitting = [e for e in expected if len(e.prompt_token_ids) + NEW_TOKENS <= num_blocks * block_size]
    fitting *= -(-14 // len(fitting))
    with flags(line, "executor", "--num-gpu-blocks-override", str(num_blocks)):
        before = asyncio.run(preemptions(line))
        check_scores(fitting, asyncio.run(generate(line, requests(fitting, 3))))
        assert asyncio.run(preemptions(line)) > before


async def preemptions(line: Line) -> float:
    return (await line.metrics())['pagewire:num_preemptions_total{service="scheduler"}']
