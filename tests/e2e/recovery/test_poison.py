"""Poisonous requests among others, with the real scheduler and a real executor: each ends alone and says why."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pagewire.config.values.faults import Fault, Kind, parse_faults
from pagewire.errors import StartupError
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.fault_injection import FaultyRunner
from pagewire.services.scheduler.observed import stats
from pagewire.v1 import common_pb2, scheduler_pb2
from pagewire.wire import rpc
from tests.e2e.conftest import short_directory
from tests.e2e.stack.test_scheduler_and_executor import Stub, scheduler
from tests.services.executor.helpers.stepping import CPU, GREEDY, LIMITS, SEEDED, alone, prompt, tiny_llama
from tests.services.executor.service.test_servicer import INFO, NUM_BLOCKS, serving
from tests.sweep import examples

NUM_TOKENS = 20
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # which would take minutes
# Token ids, and what comes of them at once, and after seven tokens of output.
FIRST = 190
KINDS = [Kind.RAISE, Kind.NAN, Kind.ILLEGAL, Kind.DEVICE]
FAULTS = parse_faults(",".join(f"{FIRST + i}:{kind},{FIRST + 4 + i}:{kind}@7" for i, kind in enumerate(KINDS)))
REASONS = {
    Kind.RAISE: "(UNKNOWN: a step failed: RuntimeError: injected: a step fails)",
    Kind.NAN: "yields NaN for",
    Kind.ILLEGAL: "the token 201 that was sampled for this request is outside the vocabulary of 200",
    Kind.DEVICE: "(INTERNAL: fatal device error: RuntimeError: injected: the device is broken)",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("poisoned"))


@dataclass
class Supervised:
    """An executor that has a successor whenever it ends."""

    address: str
    num_deaths: int = 0


@asynccontextmanager
async def supervised(model: DecoderModel, address: str) -> AsyncIterator[Supervised]:
    state = Supervised(address)

    def start() -> tuple[ModelRunner, Any]:
        return assemble(model, LIMITS, NUM_BLOCKS, CPU, make=partial(FaultyRunner, FAULTS)), INFO

    async def keep() -> None:
        while True:
            async with serving(address, start) as service:
                with suppress(DeviceError):
                    await asyncio.wrap_future(service.worker.failed)
                await service.server.links_ended()
                state.num_deaths += 1

    keeping = asyncio.create_task(keep())
    try:
        yield state
    finally:
        await rpc.cancel([keeping])


async def generate(stub: Stub, token_ids: list[int], seed: int | None) -> list[int] | str:
    """The tokens, or the message of the error."""
    params = common_pb2.SamplingParams()
    params.CopyFrom(GREEDY if seed is None else SEEDED)
    params.MergeFrom(common_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    request = scheduler_pb2.TokenRequest(prompt_token_ids=token_ids, sampling_params=params)
    tokens: list[int] = []
    try:
        async for response in stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(request=request)):
            tokens += response.token_ids
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INTERNAL
        return error.details() or ""
    return tokens


def innocent(length: int, seed: int) -> list[int]:
    return [token_id % FIRST for token_id in prompt(length, seed)]


@pytest.fixture(scope="module")
def expected(model: DecoderModel) -> Callable[[list[int], int | None], list[int]]:
    known: dict[tuple[tuple[int, ...], int | None], list[int]] = {}

    def undisturbed(token_ids: list[int], seed: int | None) -> list[int]:
        key = tuple(token_ids), seed
        if key not in known:
            known[key] = alone(model, token_ids, NUM_TOKENS, GREEDY if seed is None else SEEDED)
        return known[key]

    return undisturbed


@settings(max_examples=examples(12), deadline=None, phases=WITHOUT_SHRINKING, suppress_health_check=list(HealthCheck))
@given(
    neighbors=st.lists(st.tuples(st.integers(1, 30), st.sampled_from([None, 11])), min_size=1, max_size=5),
    poisons=st.lists(st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(0, 12)), min_size=1, max_size=3),
    head_start=st.sampled_from([0.0, 0.02]),
)
def test_neighbors_get_the_tokens_they_would_have_got(
    model: DecoderModel,
    expected: Callable[[list[int], int | None], list[int]],
    neighbors: list[tuple[int, int | None]],
    poisons: list[tuple[int, int]],
    head_start: float,
) -> None:
    prompts = [innocent(length, number) for number, (length, _) in enumerate(neighbors)]
    # Before there is another runner: each takes the model's layers for itself.
    wanted = [expected(token_ids, seed) for token_ids, (_, seed) in zip(prompts, neighbors, strict=True)]

    async def play() -> None:
        with short_directory() as name:
            async with (
                supervised(model, f"unix:{name}/e.sock") as executor,
                scheduler(Path(name), "s", executor.address) as stub,
            ):
                good = [
                    asyncio.create_task(generate(stub, token_ids, seed))
                    for token_ids, (_, seed) in zip(prompts, neighbors, strict=True)
                ]
                await asyncio.sleep(head_start)
                bad = [
                    asyncio.create_task(generate(stub, [*innocent(length, 50 + i), token_id], None))
                    for i, (token_id, length) in enumerate(poisons)
                ]
                async with asyncio.timeout(20):
                    assert await asyncio.gather(*good) == wanted
                    for reason, (token_id, _) in zip(await asyncio.gather(*bad), poisons, strict=True):
                        assert isinstance(reason, str) and REASONS[FAULTS[token_id].kind] in reason
                num_deadly = sum(FAULTS[token_id].kind is Kind.DEVICE for token_id, _ in poisons)
                assert executor.num_deaths <= 2 * num_deadly

    asyncio.run(play())


async def test_metrics_count_by_cause(model: DecoderModel, tmp_path: Path) -> None:
    counter = stats.CONDEMNED.labels("step")
    before = counter._value.get()
    with short_directory() as name:
        async with (
            supervised(model, f"unix:{name}/e.sock") as executor,
            scheduler(tmp_path, "s", executor.address) as stub,
        ):
            reason = await generate(stub, [5, FIRST, 6], None)
    assert isinstance(reason, str) and "the executor failed 2 times" in reason
    assert counter._value.get() == before + 1


def test_faults_are_chosen_by_token_id() -> None:
    assert parse_faults("7:raise, 9:hang@3") == {7: Fault(Kind.RAISE), 9: Fault(Kind.HANG, 3)}
    for wrong in ("", "7", "x:raise", "7:explode", "7:nan@x"):
        with pytest.raises(StartupError, match="--fault-injection"):
            parse_faults(wrong)
