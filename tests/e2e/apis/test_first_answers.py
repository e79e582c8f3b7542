"""The first questions that a newcomer asks. The answers stand here as transformers gives them, in fp32 and greedy."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewire.kernels.cpu.products.packed_linear import rounds_inputs
from tests.e2e.conftest import EXECUTOR_FLAGS, short_directory
from tests.e2e.line import Line, running_line

MAX_TOKENS = 24
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is 2 + 2?": "The answer to this classic math problem is 4.",
    "Name three colors.": "1. Red\n2. Blue\n3. Green",
    "Who wrote Romeo and Juliet?": (
        "The story of Romeo and Juliet by William Shakespeare is attributed to the 17th-century French playwright and"
        " poet."
    ),
    "What is the opposite of hot?": (
        "The opposite of hot is cold. This is a fundamental concept in science and technology, where heat is often"
        " associated with warmth"
    ),
    "Why is the sky blue?": (
        "The answer to this question lies in the intricate dance of light and color. The sky appears blue because of a"
        " phenomenon known"
    ),
    "Write a haiku about the sea.": (
        "The waves of the sea, a silent beauty,\nA gentle lapping of the shore,\nA reminder of the"
    ),
    "How many days are in a week?": "A week is approximately 7 days.",
    "Hello!": "Hello! I'should've been a bit overwhelmed. I'm here to help with any kind of math or science",
}

CLOSE = "Why is the sky blue?"  # Another word is as likely, to within what inputs of products rounded to bf16 change.


@pytest.fixture(params=["float32", "auto"])
def dtype(request: pytest.FixtureRequest) -> str:
    result: str = request.param
    return result


@pytest.fixture
def expected(dtype: str) -> dict[str, str]:
    """Answers by question. Where the processor multiplies in bf16 (AMX), rounding decides one of them."""
    close = {CLOSE} if dtype == "auto" and rounds_inputs() else set()
    return {question: answer for question, answer in ANSWERS.items() if question not in close}


@pytest.fixture
def answering(dtype: str, request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[Line]:
    """The default model's line in each of these dtypes."""
    if dtype == "float32":
        yield request.getfixturevalue("default_line")
        return
    flags = [dtype if flag == "float32" else flag for flag in EXECUTOR_FLAGS]
    with short_directory() as name, running_line(Path(name), str(smollm2_gguf), executor=flags) as line:
        yield line


async def ask(client: AsyncOpenAI, question: str) -> tuple[str, int]:
    """Returns the answer, and how many tokens of the prompt the prefix cache had."""
    answer = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=MAX_TOKENS
    )
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return answer.choices[0].message.content or "", usage.prompt_tokens_details.cached_tokens or 0


async def test_the_first_answers(answering: Line, expected: dict[str, str]) -> None:
    """The second time, the prefix cache serves the prompts, which changes nothing."""
    async with answering.openai() as client:
        for is_cached in (False, True):
            answers = await asyncio.gather(*(ask(client, question) for question in expected))
            assert {q: text for q, (text, _) in zip(expected, answers, strict=True)} == expected
            assert not is_cached or all(cached for _, cached in answers)


@pytest.mark.slow
def test_they_are_those_of_transformers(reference_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(reference_checkpoint, dtype=torch.float32).eval()
    for question, answer in ANSWERS.items():
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
        assert tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True) == answer
