"""The real scheduler and the real executor with a tiny model, in one process."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pagewire.config import SchedulerConfig
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.step import StepOutput
from pagewire.services.scheduler.compose import make_engine
from pagewire.services.scheduler.main import make_server, report_availability
from pagewire.services.scheduler.service.engine import Engine
from pagewire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest, TokenSubmission
from pagewire.v1.scheduler_link_pb2_grpc import SchedulerLinkServiceStub
from pagewire.wire import rpc
from pagewire.wire.discovery import Discovery, Static
from pagewire.wire.secure_rpc import NO_TLS
from tests.services.executor.helpers.drafting import KnownTexts
from tests.services.executor.helpers.stepping import CPU, LIMITS, alone, prompt, tiny_llama
from tests.services.executor.service.test_servicer import INFO, NUM_BLOCKS, serving
from tests.services.scheduler.service_line import Collected

GREEDY = common_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)


class Stub(scheduler_pb2_grpc.SchedulerServiceStub):
    """A scheduler with the tokenizer services' stream and the engine behind it."""

    def __init__(self, channel: grpc.aio.Channel, engine: Engine) -> None:
        super().__init__(channel)
        self.engine = engine
        self.Connect = SchedulerLinkServiceStub(channel).Connect

    async def submit(self, submission: TokenSubmission) -> Collected:
        """Yields the outputs of a tokenizer service's submission, by its request_id. Raises RpcError."""
        call, collected = self.Connect(), Collected()
        await call.write(SchedulerLinkServiceConnectRequest(requests=[submission]))
        await collected.read_until_finished(call, submission.request_id)
        call.cancel()
        if submission.request_id in collected.errors:
            raise rpc.RpcError.from_message(collected.errors[submission.request_id])
        return collected


@asynccontextmanager
async def scheduler(
    directory: Path, name: str, *executors: str, discovery: Discovery | None = None, **config: Any
) -> AsyncIterator[Stub]:
    """Starts a scheduler. discovery: finds the executors, in place of addresses."""
    address = f"unix:{directory}/{name}.sock"
    settings = SchedulerConfig(listen=address, executor_address=",".join(executors), shutdown_timeout=1.0, **config)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(rpc.channel(address))
        engine = make_engine(settings, discovery or Static(executors), NO_TLS.listed_channel)
        server = make_server(settings, engine)
        await server.start()
        working = [asyncio.create_task(engine.run()), asyncio.create_task(report_availability(engine, server))]
        try:
            yield Stub(channel, engine)
        finally:
            await server.stop()
            await rpc.cancel(working)


async def generate(stub: Stub, token_ids: list[int], started: asyncio.Event | None = None) -> list[int]:
    """Sixty tokens; started is set with the first."""
    request = scheduler_pb2.TokenRequest(prompt_token_ids=token_ids, sampling_params=GREEDY)
    tokens: list[int] = []
    async for response in stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(request=request)):
        tokens += response.token_ids
        if started is not None:
            started.set()
    return tokens


async def test_the_later_scheduler_has_the_executor_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagewire.services.executor.service.servicer.TERM_HELD_S", 0.5)
    model = tiny_llama(tmp_path / "model")
    expected = {length: alone(model, prompt(length), 60) for length in (9, 12)}
    executor = f"unix:{tmp_path}/executor.sock"
    async with (
        serving(executor, lambda: (assemble(model, LIMITS, NUM_BLOCKS, CPU), INFO)),
        scheduler(tmp_path, "earlier", executor) as earlier,
    ):
        started = asyncio.Event()
        interrupted = asyncio.create_task(generate(earlier, prompt(9), started))
        await started.wait()
        drained = asyncio.create_task(earlier.engine.drained())
        async with scheduler(tmp_path, "later", executor) as later:
            for _ in range(3):
                assert await generate(later, prompt(12)) == expected[12]
            async with asyncio.timeout(10):
                while "cannot be used (FAILED_PRECONDITION" not in caplog.text:
                    await generate(later, prompt(12))
            assert caplog.text.count("lost the executor") == 1, "no scheduler takes it from the later one"
            assert not interrupted.done()
            await asyncio.wait_for(drained, 10)  # its requests are to be handed on, if it received SIGTERM
        assert await asyncio.wait_for(interrupted, 20) == expected[9], "not a token lost or repeated"


@pytest.mark.parametrize("accuracy", [1.0, 0.6, 0.0])
async def test_drafts_change_the_number_of_steps_and_never_the_text(tmp_path: Path, accuracy: float) -> None:
    model = tiny_llama(tmp_path / "model")
    prompts = [prompt(length, seed=length) for length in (5, 9, 14)]
    expected = [alone(model, token_ids, 60) for token_ids in prompts]
    texts = [[*token_ids, *output] for token_ids, output in zip(prompts, expected, strict=True)]
    num_steps = 0

    class CountingRunner(ModelRunner):
        def execute(self, *args: Any) -> StepOutput:
            nonlocal num_steps
            num_steps += 1
            return super().execute(*args)

    def start() -> tuple[ModelRunner, ExecutorInfo]:
        num_blocks = 3 * NUM_BLOCKS  # no tokens are drafted where blocks are scarce
        runner = CountingRunner(model, LIMITS, num_blocks, CPU, proposer=KnownTexts(texts, accuracy))
        return runner, dataclasses.replace(INFO, kv_groups=runner.kv_groups, max_draft_tokens=runner.max_draft_tokens)

    executor = f"unix:{tmp_path}/executor.sock"
    async with serving(executor, start), scheduler(tmp_path, "s", executor) as stub:
        assert await asyncio.gather(*(generate(stub, token_ids) for token_ids in prompts)) == expected
    # All right, a step gains four tokens; up to two are scheduled before the last result is known.
    assert num_steps < 30 if accuracy == 1 else num_steps >= 30


async def test_a_replica_takes_over_what_another_began(tmp_path: Path) -> None:
    models = [tiny_llama(tmp_path / f"model{index}") for index in range(2)]
    prompts = [prompt(length, seed=length) for length in range(5, 13)]
    expected = [alone(models[0], token_ids, 60) for token_ids in prompts]
    executors = [f"unix:{tmp_path}/e{index}.sock" for index in range(2)]

    def start(index: int) -> Callable[[], tuple[ModelRunner, ExecutorInfo]]:
        info = dataclasses.replace(INFO, incarnation=index)
        return lambda: (assemble(models[index], LIMITS, NUM_BLOCKS, CPU), info)

    async with serving(executors[0], start(0)), scheduler(tmp_path, "s", *executors) as stub:
        async with serving(executors[1], start(1)):
            await until_executors(stub, 2)
            started = [asyncio.Event() for _ in prompts]
            generating = [
                asyncio.create_task(generate(stub, token_ids, event))
                for token_ids, event in zip(prompts, started, strict=True)
            ]
            for event in started:
                await event.wait()
        assert await asyncio.gather(*generating) == expected


async def test_a_request_yields_the_hidden_state_of_its_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama(tmp_path / "model")
    expected = alone(model, prompt(12), 60)
    executor = f"unix:{tmp_path}/executor.sock"
    token_ids = prompt(9)
    async with (
        serving(executor, lambda: (assemble(model, LIMITS, NUM_BLOCKS, CPU), INFO)),
        scheduler(tmp_path, "s", executor) as stub,
    ):
        request = scheduler_pb2.TokenRequest(prompt_token_ids=token_ids, yields_vector=True)
        # Texts before and between them: vectors and tokens share steps.
        texts = [asyncio.create_task(generate(stub, prompt(12)))]
        calls = []
        for _ in range(2):
            calls.append(stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(request=request)))
            texts.append(asyncio.create_task(generate(stub, prompt(12))))
        first, second = [[response async for response in call] for call in calls]
        assert [await text for text in texts] == [expected] * 3
    assert "lost the executor" not in caplog.text
    assert len(first) == len(second) == 1 and first[0].finish_reason == common_pb2.FINISH_REASON_STOP
    hidden = torch.tensor(list(first[0].vector.values))
    torch.testing.assert_close(hidden, torch.tensor(list(second[0].vector.values)))
    next_token = int(model.compute_logits(hidden[None]).argmax())
    assert [next_token] == alone(model, token_ids, 1), "it is what the next token is sampled from"


async def test_a_vector_comes_with_the_last_token_of_a_prompt_alone(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    executor = f"unix:{tmp_path}/executor.sock"
    token_ids = prompt(41)
    async with (
        serving(executor, lambda: (assemble(model, LIMITS, NUM_BLOCKS, CPU), INFO)),
        scheduler(tmp_path, "s", executor, max_num_batched_tokens=40) as stub,
    ):
        request = scheduler_pb2.TokenRequest(prompt_token_ids=token_ids, yields_vector=True)
        (response,) = [
            one async for one in stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(request=request))
        ]
    next_token = int(model.compute_logits(torch.tensor(list(response.vector.values))[None]).argmax())
    assert [next_token] == alone(model, token_ids, 1)


async def until_executors(stub: Stub, count: int) -> None:
    async with asyncio.timeout(10):
        while True:
            if (await stub.GetLoad(scheduler_pb2.GetLoadRequest())).num_executors == count:
                return
            await asyncio.sleep(0.01)
