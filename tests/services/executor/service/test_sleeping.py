"""A model sleeps and wakes in the same process: its memory comes and goes, and nothing else changes."""

import asyncio
import gc
import tempfile
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pagewire.config import ExecutorConfig
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service.sleep.host_copy import HostCopy
from pagewire.services.executor.service.sleep.resting_runner import RestingRunner
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.tiers.start import start_tiered
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.v1.common_pb2 import Adapter
from pagewire.v1.executor_pb2 import SleepDecision, SleepState, Weights
from pagewire.wire import rpc
from tests.services.executor.helpers.adapters import save_adapter
from tests.services.executor.helpers.servicers import servicer_of
from tests.services.executor.helpers.stepping import CPU
from tests.services.executor.models.tiny import save_tiny
from tests.services.executor.service.test_replacement import generated, save_other, started
from tests.services.executor.service.test_servicer import Service, generate, opened

PROMPT = [5, 17, 3, 60, 21, 8, 44]


@asynccontextmanager
async def serving(model: Path, cache: Path, **flags: Any) -> AsyncIterator[Service]:
    """Yields an executor."""
    config = ExecutorConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=8,
        kv_cache_memory_bytes=1 << 20,
        num_threads=1,
        weights_cache=str(cache),
        **flags,
    )

    def start() -> Any:
        runner, info = start_tiered(config, str(model), lambda fraction, text: None)
        return RestingRunner(runner), info

    worker = Worker(start, on_cuda=False)
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        address = f"unix:{directory}/executor.sock"
        servicer, server = servicer_of(worker, config), rpc.Server([address], shutdown_timeout=1.0)
        server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, "pagewire.v1.ExecutorService")
        await server.start()
        worker.start()
        await asyncio.wrap_future(worker.loaded)
        try:
            async with rpc.channel(address) as channel:
                yield Service(worker, server, executor_pb2_grpc.ExecutorServiceStub(channel))
        finally:
            await server.stop()
            await asyncio.to_thread(worker.stop)
            await servicer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    save_tiny(path, "Llama")
    return path


async def describe(service: Service) -> executor_pb2.DescribeResponse:
    return await service.stub.Describe(executor_pb2.DescribeRequest())


async def sleep(service: Service, level: int, *, wakes: bool = False, term: int = 0) -> None:
    state = SleepState(level=level, wakes_on_request=wakes)
    await service.stub.Sleep(executor_pb2.SleepRequest(state=state, term=term))


async def wake(service: Service) -> None:
    await service.stub.Wake(executor_pb2.WakeRequest())


async def output(service: Service) -> list[int]:
    call = await opened(service)
    tokens = await generate(call, 8, PROMPT)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return tokens


@pytest.mark.parametrize("level", [1, 2])
async def test_everything_is_as_before_after_a_wake(level: int, model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path / "cache") as service:
        before, tokens = await describe(service), await output(service)
        await sleep(service, level, wakes=True)
        asleep = await describe(service)
        assert asleep.sleep == SleepState(level=level, wakes_on_request=True)
        asleep.ClearField("sleep")
        assert asleep == before, "a scheduler that starts now learns everything"
        await wake(service)
        await wake(service)
        assert await describe(service) == before
        assert await output(service) == tokens


async def test_a_stream_ends_when_the_model_falls_asleep_and_none_opens_before_it_wakes(
    model: Path, tmp_path: Path
) -> None:
    async with serving(model, tmp_path / "cache") as service:
        call = await opened(service, term=7)
        await sleep(service, 1, term=7)
        assert await call.read() is grpc.aio.EOF
        refused = service.stub.Execute()
        await refused.write(executor_pb2.StepRequest(term=7))
        for waited in (
            refused.read(),
            service.stub.LoadWeights(executor_pb2.LoadWeightsRequest(weights=Weights(model=str(model)))),
            service.stub.LoadAdapter(executor_pb2.LoadAdapterRequest(adapter=Adapter(name="a", path="/a"))),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="the model sleeps; wake it first"):
                await waited
        with pytest.raises(grpc.aio.AioRpcError, match="started later"):
            await sleep(service, 1, term=6)
        await sleep(service, 2, term=7)
        await sleep(service, 1, wakes=True, term=7)
        assert (await describe(service)).sleep == SleepState(level=2, wakes_on_request=True), "what is gone stays gone"


@pytest.mark.parametrize("level", [1, 2])
async def test_nothing_keeps_the_model_and_the_kv_cache_of_a_sleeper(level: int, model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path / "cache", kv_offloading_size=0.001) as service:
        await output(service)
        model_of = service.worker.runner.model
        runners = [one for one in gc.get_objects() if type(one) is ModelRunner and one.model is model_of]
        kept = weakref.WeakSet[Any]([*runners, model_of])
        del runners, model_of
        assert len(kept) == 2
        await sleep(service, level)
        gc.collect()
        assert not kept


async def test_a_model_that_cannot_be_loaded_sleeps_on(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    save_tiny(copy, "Llama")
    async with serving(copy, tmp_path / "cache") as service:
        tokens = await output(service)
        await sleep(service, 2)
        copy.rename(tmp_path / "away")
        with pytest.raises(grpc.aio.AioRpcError, match="the model cannot be woken: ") as caught:
            await wake(service)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await describe(service)).sleep.level == 2
        (tmp_path / "away").rename(copy)
        await wake(service)
        assert await output(service) == tokens


async def test_other_weights_are_to_be_installed_again(model: Path, tmp_path: Path) -> None:
    other = save_other(model, tmp_path / "other")
    async with serving(model, tmp_path / "cache") as service:
        first, tokens = (await describe(service)).weights, await output(service)

        async def install() -> list[int]:
            wanted = executor_pb2.LoadWeightsRequest(weights=Weights(model=str(other), number=1))
            loaded = (await service.stub.LoadWeights(wanted)).weights
            await service.stub.InstallWeights(executor_pb2.InstallWeightsRequest(weights=loaded))
            return await output(service)

        replaced = await install()
        assert replaced != tokens
        await sleep(service, 1)
        assert (await describe(service)).weights.number == 1
        await wake(service)
        assert (await describe(service)).weights == first, "the scheduler sees what is missing"
        assert await output(service) == tokens, "the packed weights are those of --model"
        assert await install() == replaced


async def test_adapters_stay_in_memory(model: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "adapter", model)
    async with serving(model, tmp_path / "cache", enable_lora=True, max_loras=1, max_lora_rank=8) as service:
        wanted = Adapter(name="a", path=str(path))
        loaded = (await service.stub.LoadAdapter(executor_pb2.LoadAdapterRequest(adapter=wanted))).adapter
        await sleep(service, 2)
        await wake(service)
        assert list((await describe(service)).adapters) == [loaded]
        slots = service.worker.runner.adapters
        assert slots.host.get(loaded.digest) is not None  # type: ignore[attr-defined]
        await output(service)


async def test_an_unknown_level_is_refused(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path / "cache") as service:
        with pytest.raises(grpc.aio.AioRpcError, match="no sleep of level 3"):
            await sleep(service, 3)
        await output(service)


async def test_the_latest_decision_is_remembered(model: Path, tmp_path: Path) -> None:
    """Shows it to a scheduler that restarts, which does not take an executor that is slow to wake for a sleeper."""
    async with serving(model, tmp_path / "cache") as service:
        assert not (await describe(service)).HasField("sleep_decision")
        state = SleepState(level=2)
        await service.stub.Sleep(executor_pb2.SleepRequest(state=state, decided_at=7))
        await service.stub.Sleep(executor_pb2.SleepRequest(state=SleepState(level=1), decided_at=5))
        assert (await describe(service)).sleep_decision == SleepDecision(state=state, decided_at=7)
        await service.stub.Wake(executor_pb2.WakeRequest(decided_at=8))
        assert (await describe(service)).sleep_decision == SleepDecision(state=SleepState(), decided_at=8)


def test_weights_in_host_memory_return_as_they_were(model: Path) -> None:
    """The host stands in for the device."""
    _, runner, _ = started(model, enforce_eager=True)
    tokens = generated(runner)
    weights = next(iter(runner.model.load_targets().values()))  # type: ignore[attr-defined]
    copy = HostCopy((runner.model, runner.pooling), CPU, runner.kv_caches)
    copy.release()
    assert weights.untyped_storage().nbytes() == 0 and copy.nbytes > 0
    copy.restore()
    assert generated(runner) == tokens
    assert all(bool(torch.isfinite(cache).all()) for cache in runner.kv_caches)
