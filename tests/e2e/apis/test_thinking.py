"""Outputs that think, from the real scheduler and the real executor with a tiny model of random weights."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pagewire.v1 import scheduler_pb2
from pagewire.v1.common_pb2 import FinishReason, SamplingParams, Thinking, TokenSequence
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from tests.e2e.apis.test_grammars import DENSE, Output, Tiny, dying_executor, executor, served
from tests.e2e.stack.test_scheduler_and_executor import Stub, scheduler
from tests.services.executor.helpers.constrained import EOS, fits, save_constrained
from tests.services.executor.helpers.stepping import BLOCK_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = list(range(5, 25))
START, END = [401], [402, 403]  # of no text, so that no grammar allows them
MARKS: dict[str, Any] = {"start": TokenSequence(token_ids=START), "end": TokenSequence(token_ids=END)}
FREE: dict[str, Any] = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 60}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("thinking")
    return Tiny(path, save_constrained(path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> AsyncIterator[Stub]:
    async with served(tmp_path_factory.mktemp("line"), tiny) as stub:
        yield stub


async def generate(
    stub: Stub, thinking: Thinking | None, seed: int = 1, resumed: list[int] | None = None, **params: Any
) -> Output:
    request = scheduler_pb2.TokenRequest(
        prompt_token_ids=[*PROMPT, 30 + seed],
        sampling_params=SamplingParams(thinking=thinking, seed=seed, **params),
    )
    output = Output(list(resumed or ()))
    if resumed:
        collected = await stub.submit(TokenSubmission(request=request, resume_token_ids=resumed))
        output.token_ids += collected.token_ids[0]
        (output.reason,) = collected.finish_reasons[0]
        return output
    async for response in stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(request=request)):
        output.token_ids += response.token_ids
        output.reason = response.finish_reason
    return output


def begun(budget: int | None = None) -> Thinking:
    return Thinking(**MARKS, begun=True, budget=budget)


def split(token_ids: list[int]) -> tuple[list[int], list[int]]:
    """Splits an output at the first end of its reasoning."""
    place = next((i for i in range(len(token_ids)) if token_ids[i : i + len(END)] == END), None)
    assert place is not None, "the reasoning does not end"
    return token_ids[:place], token_ids[place + len(END) :]


async def test_a_budget_ends_the_reasoning_at_its_last_token(stub: Stub) -> None:
    """Steps run two deep, of many requests at once; those without a budget are as alone."""
    budgets = [0, 1, 2, 9, 40]
    free = [await generate(stub, None, seed, **FREE) for seed in range(len(budgets))]
    mixed = await asyncio.gather(
        *(generate(stub, begun(budget), seed, **FREE) for seed, budget in enumerate(budgets)),
        *(generate(stub, None, seed, **FREE) for seed in range(len(budgets))),
    )
    assert mixed[len(budgets) :] == free
    for budget, output, unlimited in zip(budgets, mixed, free, strict=False):
        thought, answer = split(output.token_ids)
        assert thought == unlimited.token_ids[:budget]
        assert len(answer) == 60 - budget - len(END)


async def test_a_reasoning_that_the_model_begins(stub: Stub) -> None:
    eager: dict[str, Any] = {"logit_bias_ids": START, "logit_bias_values": [6.0]}  # as likely as not, at each token
    outputs = await asyncio.gather(
        *(generate(stub, Thinking(**MARKS, budget=5), seed, **FREE, **eager) for seed in range(8))
    )
    for output in outputs:
        assert START[0] in output.token_ids
        start = output.token_ids.index(START[0]) + 1
        assert len(split(output.token_ids[start:])[0]) == 5


async def test_the_grammar_is_for_the_answer(stub: Stub, tiny: Tiny) -> None:
    """End tokens, which the model wants most, come where the answer is whole."""
    eager: dict[str, Any] = {"logit_bias_ids": [EOS], "logit_bias_values": [100.0]}
    options: dict[str, Any] = {"grammar": DENSE, "max_tokens": 400, "temperature": 1.0}
    outputs = await asyncio.gather(
        *(generate(stub, begun(12), seed, **options, **eager) for seed in range(4)),
        *(generate(stub, begun(12), seed, **options, min_tokens=100) for seed in range(4)),
    )
    for output in outputs:
        thought, answer = split(output.token_ids)
        assert (len(thought), EOS in thought) == (12, False)
        assert (output.reason, answer[-1]) == (FinishReason.FINISH_REASON_STOP, EOS)
        assert fits(DENSE, tiny.tokenizer.decode(answer, skip_special_tokens=True))


@pytest.mark.parametrize("bias", [-100.0, 0.0, 100.0])
async def test_a_model_chooses_whether_to_think_before_an_answer(stub: Stub, tiny: Tiny, bias: float) -> None:
    options: dict[str, Any] = {"grammar": DENSE, "max_tokens": 400, "temperature": 1.0}
    eager: dict[str, Any] = {"logit_bias_ids": START, "logit_bias_values": [bias]}
    thinking = Thinking(**MARKS, budget=4)
    for output in await asyncio.gather(*(generate(stub, thinking, seed, **options, **eager) for seed in range(4))):
        token_ids = output.token_ids
        if bias:
            assert (token_ids[0] == START[0]) == (bias > 0)
        if token_ids[0] == START[0]:
            assert len(split(token_ids[1:])[0]) == 4
            token_ids = split(token_ids)[1]
        assert fits(DENSE, tiny.tokenizer.decode(token_ids, skip_special_tokens=True))


BOTH = {"grammar": DENSE, "max_tokens": 400, "temperature": 0.7}


async def test_a_resumed_output_goes_on_where_it_was(stub: Stub) -> None:
    whole = await generate(stub, begun(9), **BOTH)
    free = await generate(stub, begun(9), **FREE)
    beginnings = (1, 7, 8, 9, 10, 11, 13)  # in the reasoning, in its end and in the answer
    assert await asyncio.gather(
        *(generate(stub, begun(9), resumed=whole.token_ids[:known], **BOTH) for known in beginnings),
        *(generate(stub, begun(9), resumed=free.token_ids[:known], **FREE) for known in beginnings),
    ) == [whole] * len(beginnings) + [free] * len(beginnings)


async def test_preemption_changes_nothing(tmp_path: Path, tiny: Tiny, stub: Stub) -> None:
    async def outputs(stub: Stub, max_tokens: int) -> list[Output]:
        options = BOTH | {"max_tokens": max_tokens}
        return await asyncio.gather(*(generate(stub, begun(15), seed, **options) for seed in range(5)))

    expected = await outputs(stub, 400)
    most = max(len(output.token_ids) for output in expected) + 1  # more is refused where the context is smaller
    async with served(tmp_path, tiny, num_blocks=(len(PROMPT) + 1 + most) // BLOCK_SIZE + 4) as cramped:
        assert await outputs(cramped, most) == expected


async def test_an_executor_that_dies_takes_no_count_along(tmp_path: Path, tiny: Tiny) -> None:
    address = f"unix:{tmp_path}/executor.sock"
    async with scheduler(tmp_path, "scheduler", address) as stub:

        async def outputs() -> list[Output]:
            return await asyncio.gather(*(generate(stub, begun(10), seed, **FREE) for seed in range(2)))

        async with executor(address, tiny):
            expected = await outputs()
        interrupted = asyncio.create_task(outputs())
        # Each death is late enough that no request runs alone any more because of the last: one that dies alone again
        # ends.
        for num_steps in (3, 20, 20):
            async with dying_executor(address, tiny, num_steps):
                pass
        async with executor(address, tiny):
            assert await asyncio.wait_for(interrupted, 60) == expected


async def test_marks_that_are_none_are_refused(stub: Stub) -> None:
    refused = {
        "thinking.end is empty": Thinking(start=MARKS["start"]),
        "thinking.start is empty": Thinking(end=MARKS["end"]),
        "thinking.closing must end with thinking.answer": Thinking(**MARKS, closing=TokenSequence(token_ids=[1])),
        "thinking.budget is -1": begun(-1),
        "thinking.start has 65 tokens": Thinking(end=MARKS["end"], start=TokenSequence(token_ids=[1] * 65)),
        "thinking.start contains 420": Thinking(end=MARKS["end"], start=TokenSequence(token_ids=[420])),
    }
    for message, thinking in refused.items():
        with pytest.raises(grpc.aio.AioRpcError, match=message) as raised:
            await generate(stub, thinking)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="allowed_token_ids cannot be combined with thinking"):
        await generate(stub, begun(3), allowed_token_ids=[5, 6])
