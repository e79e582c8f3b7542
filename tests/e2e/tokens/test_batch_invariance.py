"""Requests with --batch-invariant: the same tokens and log probabilities, bit by bit, in any company."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.v1 import common_pb2, inference_pb2
from tests.e2e.conftest import SCHEDULER_FLAGS, short_directory
from tests.e2e.line import Line, running_line
from tests.e2e.prompts import PROMPTS

# 40 blocks of 16 tokens are too few for all prompts at once; chunks are shorter than the longest prompt.
FLAGS = ["--dtype", "bfloat16", "--batch-invariant", "--max-model-len", "512", "--num-gpu-blocks-override", "40"]
FLAGS += ["--max-num-batched-tokens", "64", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
SAMPLED = common_pb2.SamplingParams(temperature=0.7, seed=5, max_tokens=24, min_tokens=24, logprobs=2)

pytestmark = pytest.mark.slow

Answer = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module", params=["gguf", "none"])
def line(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[Line]:
    """The default model's line, as stored and dense."""
    flags = {"executor": [*FLAGS, "--quantization", request.param], "scheduler": SCHEDULER_FLAGS}
    with short_directory() as name, running_line(Path(name), str(smollm2_gguf), **flags) as running:
        yield running


async def answers(line: Line, prompts: list[str], *, together: bool) -> list[Answer]:
    async with line.inference() as stub:

        async def one(prompt: str) -> Answer:
            tokens: list[int] = []
            logprobs: list[float] = []
            request = inference_pb2.GenerateRequest(text=prompt, sampling_params=SAMPLED)
            async for response in stub.Generate(request, timeout=250):
                tokens += response.token_ids
                logprobs += [entry.logprob for entry in response.logprobs]
            return tuple(tokens), tuple(logprobs)

        if together:
            return await asyncio.gather(*(one(prompt) for prompt in prompts))
        return [await one(prompt) for prompt in prompts]


async def test_the_same_bits(line: Line) -> None:
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 900][:12]
    alone = await answers(line, prompts, together=False)
    assert all(len(tokens) == len(logprobs) == 24 for tokens, logprobs in alone)
    assert await answers(line, prompts, together=True) == alone, "in batches, with preemptions and cached prefixes"
    line.restart("executor")
    await line.wait_ready()
    assert await answers(line, prompts, together=True) == alone, "after a restart, nothing cached"
    pending = asyncio.create_task(answers(line, prompts, together=True))
    await asyncio.sleep(1)
    line.restart("executor")
    assert await pending == alone, "recovered from a death"
