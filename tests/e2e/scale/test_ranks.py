"""An executor of two processes with the real scheduler: the tokens are those of one, also when a process is lost."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
import torch

from pagewire.services.executor.loading.loader import load_model
from pagewire.v1 import admin_pb2, admin_pb2_grpc, common_pb2, executor_pb2, executor_pb2_grpc, scheduler_pb2
from pagewire.wire import rpc
from tests.e2e.conftest import short_directory
from tests.e2e.forked import Forked
from tests.e2e.line import free_port
from tests.e2e.stack.test_scheduler_and_executor import Stub, scheduler
from tests.services.executor.helpers.stepping import CPU, prompt, write_tiny_llama
from tests.services.executor.helpers.stepping import alone as generate_alone
from tests.services.executor.models.tiny import load as load_tiny
from tests.services.executor.models.tiny import save_tiny
from tests.services.executor.service.test_replacement import save_other
from tests.services.executor.service.test_servicer import first_step, next_step

NUM_TOKENS, PROMPT = 500, prompt(9)
FLAGS = ["--device", "cpu", "--dtype", "float32", "--load-format", "dummy", "--max-model-len", "512"]
FLAGS += ["--kv-cache-memory-bytes", "16MiB", "--hang-timeout", "6", "--tensor-parallel-size", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512, initializer_range=0.3)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    whole = load_model(model, dtype="float32", device=CPU, load_format="dummy")
    return generate_alone(whole, PROMPT, 60)


@pytest.fixture
def sockets() -> Iterator[Path]:
    with short_directory() as name:
        yield Path(name)


class Executor:
    """Restarts its leader whenever that ends, as a supervisor does."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.address = f"unix:{directory}/executor.sock"
        self.endings: list[int] = []
        self._argv = ["executor", *FLAGS, *arguments]
        self._log = directory / "executor.log"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def follower(self) -> int:
        """The latest one's process id."""
        return int(re.findall(r"rank 1 has joined: process (\d+)", self.log)[-1])

    async def keep(self) -> None:
        while True:
            self.process = self.start("--listen", self.address)
            self.endings.append(await ending(self.process))

    def start(self, *arguments: str) -> Forked:
        """Starts one process of the group."""
        return Forked([*self._argv, *arguments], self._log, {})


async def ending(process: Forked) -> int:
    """Waits until a process has ended; returns its exit code."""
    while (code := process.poll()) is None:  # noqa: ASYNC110 - the state of a process
        await asyncio.sleep(0.02)
    return code


@asynccontextmanager
async def running(directory: Path, *arguments: str) -> AsyncIterator[tuple[Executor, Stub]]:
    executor = Executor(directory, *arguments)
    keeping = asyncio.create_task(executor.keep())
    async with AsyncExitStack() as stack:
        stub = await stack.enter_async_context(scheduler(directory, "scheduler", executor.address))
        try:
            yield executor, stub
        finally:
            await rpc.cancel([keeping])
            executor.process.kill()
            await ending(executor.process)


async def generate(
    stub: Stub, num_tokens: int, begun: asyncio.Event | None = None, token_ids: Sequence[int] = PROMPT
) -> list[int]:
    params = common_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
    request = scheduler_pb2.TokenRequest(prompt_token_ids=token_ids, sampling_params=params)
    tokens: list[int] = []
    async for response in stub.Generate(
        scheduler_pb2.SchedulerServiceGenerateRequest(request=request), wait_for_ready=True
    ):
        tokens += response.token_ids
        if begun is not None and tokens:
            begun.set()
    return tokens


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110, ASYNC240 - the state of a process
            await asyncio.sleep(0.02)


# A killed rank of a group of stages is in the quick suite: tests/e2e/scale/test_stage_processes.py.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
async def test_a_group_goes_on_whatever_happens_to_one_of_its_processes(
    model: Path, expected: list[int], sockets: Path, number: signal.Signals
) -> None:
    async with running(sockets, "--model", str(model)) as (executor, stub), asyncio.timeout(200):
        undisturbed = await generate(stub, NUM_TOKENS)
        assert undisturbed[: len(expected)] == expected
        begun, victim = asyncio.Event(), executor.follower
        generating = asyncio.create_task(generate(stub, NUM_TOKENS, begun))
        await begun.wait()
        os.kill(victim, number)
        assert not generating.done()
        assert await generating == undisturbed
        assert executor.endings == [-signal.SIGKILL], "the leader ends as if killed, so that no request is a suspect"
        await until_gone(victim)
        assert "rank 1 of the executor" in executor.log
        assert ("hangs: no sign of life" in executor.log) == (number == signal.SIGSTOP)
        follower = executor.follower
        executor.process.kill()
        await until_gone(follower)


async def direct(executor: Executor, num_tokens: int, request_id: int = 7) -> list[int]:
    """Generates by a scheduler of its own, which takes the executor from the other one. request_id: of steps behind the
    first."""
    async with rpc.channel(executor.address) as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
        await call.write(executor_pb2.StepRequest(term=2**62))
        await call.read()
        tokens: list[int] = []
        for step_id in range(1, num_tokens + 1):
            await call.write(first_step(PROMPT) if step_id == 1 else next_step(step_id, request_id))
            result = await call.read()
            assert isinstance(result, executor_pb2.StepResult)
            tokens += result.token_ids
        await call.done_writing()
    return tokens


async def test_a_poisonous_request_ends_alone(model: Path, expected: list[int], sockets: Path) -> None:
    """All processes find that they cannot do its step, and go on: none of them ends."""
    poison = next(token_id for token_id in range(3, 200) if token_id not in [*PROMPT, *expected])
    faults = ["--fault-injection", f"{poison}:raise@2"]
    async with running(sockets, "--model", str(model), *faults) as (executor, stub), asyncio.timeout(100):
        begun = asyncio.Event()
        neighbour = asyncio.create_task(generate(stub, NUM_TOKENS, begun))
        await begun.wait()
        (load,) = (await stub.GetLoad(scheduler_pb2.GetLoadRequest())).executors
        assert (load.num_ranks, load.pipeline_stages) == (2, 1)
        with pytest.raises(grpc.aio.AioRpcError, match="a step failed: RuntimeError: injected"):
            await generate(stub, 20, token_ids=[poison])
        assert not neighbour.done()
        assert (await neighbour)[: len(expected)] == expected
        with pytest.raises(grpc.aio.AioRpcError, match="unknown request 8: it has no row here"):
            await direct(executor, 5, request_id=8)
        assert await direct(executor, 20) == expected[:20], "after a step that broke the protocol"
        async with rpc.channel(executor.address) as channel:
            reported = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        ranks = reported.services[0].executor.ranks
        assert [rank.state for rank in ranks] == [admin_pb2.RankState.RANK_STATE_READY] * 2
        assert all(rank.wait_seconds > 0 for rank in ranks) and f"process {executor.follower} " in ranks[1].process
        assert not executor.endings


@pytest.mark.parametrize("sizes", [[], ["-tp", "1", "-pp", "2"]], ids=["tensor", "stages"])
@pytest.mark.slow
async def test_weights_are_replaced_in_all_processes(tmp_path: Path, sockets: Path, sizes: list[str]) -> None:
    save_tiny(tmp_path / "a", "Llama", vocab_size=200, max_position_embeddings=512)
    save_other(tmp_path / "a", tmp_path / "b")
    save_other(tmp_path / "a", tmp_path / "none", change=lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    before, after = (generate_alone(load_tiny(tmp_path / name), PROMPT, 20) for name in "ab")
    assert before != after
    executor = Executor(sockets, "--model", str(tmp_path / "a"), "--load-format", "auto", *sizes)
    keeping = asyncio.create_task(executor.keep())
    try:
        async with asyncio.timeout(100), rpc.channel(executor.address) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            await stub.Describe(executor_pb2.DescribeRequest(), wait_for_ready=True)
            assert await direct(executor, 20) == before
            wanted = executor_pb2.Weights(model=str(tmp_path / "none"))
            with pytest.raises(grpc.aio.AioRpcError, match="some weights are NaN"):
                await stub.LoadWeights(executor_pb2.LoadWeightsRequest(weights=wanted))
            wanted = executor_pb2.Weights(model=str(tmp_path / "b"))
            loaded = (await stub.LoadWeights(executor_pb2.LoadWeightsRequest(weights=wanted))).weights
            assert await direct(executor, 20) == before, "they are not in force yet"
            await stub.InstallWeights(executor_pb2.InstallWeightsRequest(weights=loaded, term=2**62))
            assert await direct(executor, 20) == after
        assert not executor.endings
    finally:
        await rpc.cancel([keeping])
        executor.process.kill()
        await ending(executor.process)


async def test_processes_that_others_start_meet_over_tcp(model: Path, expected: list[int], sockets: Path) -> None:
    """Runs ranks with the collectives of gloo."""
    external = ["--distributed-executor-backend", "external", "--leader", f"127.0.0.1:{free_port()}"]
    external += ["--group-secret", "s", "--model", str(model)]
    async with running(sockets, *external) as (executor, stub), asyncio.timeout(100):
        follower = executor.start("--rank", "1")
        assert await generate(stub, len(expected)) == expected
        executor.process.kill()
        assert await ending(follower) == 1
    assert "the leader has ended, and so does rank 1" in executor.log
