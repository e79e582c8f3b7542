"""Adapters over the executor's service: loaded, kept in memory or read again, put into slots, forgotten."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.config import ExecutorConfig
from pagewire.services.executor.adapters import directory as directory_module
from pagewire.services.executor.adapters.host import HostAdapter
from pagewire.services.executor.adapters.loading import load_adapter
from pagewire.services.executor.adapters.serving import ServedAdapters
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.service import convert
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.start.startup import start_runner
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.v1.common_pb2 import Adapter
from pagewire.wire import rpc
from tests.services.executor.adapters.test_served import PROMPTS, start, together
from tests.services.executor.helpers.adapters import merged, save_adapter, save_stacked
from tests.services.executor.helpers.servicers import servicer_of
from tests.services.executor.models.experts.test_experts import EXPERTS
from tests.services.executor.models.tiny import save_tiny
from tests.services.executor.service.test_servicer import GREEDY, Service, next_step, opened

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 48,
    "num_threads": 1,
    "enforce_eager": True,
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 8,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    save_tiny(path, "Llama")
    return path


@asynccontextmanager
async def serving(model: Path, **flags: Any) -> AsyncIterator[Service]:
    config = ExecutorConfig(model=str(model), **(SETTINGS | flags))
    worker = Worker(lambda: start_runner(config, str(model), lambda fraction, text: None), on_cuda=False)
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


async def load(service: Service, name: str, path: Path | str, digest: str = "") -> Adapter:
    wanted = Adapter(name=name, path=str(path), digest=digest)
    return (await service.stub.LoadAdapter(executor_pb2.LoadAdapterRequest(adapter=wanted))).adapter


async def refusal(service: Service, *wanted: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(service, *wanted)
    return caught.value.code(), caught.value.details() or ""


async def listed(service: Service) -> list[Adapter]:
    return list((await service.stub.Describe(executor_pb2.DescribeRequest())).adapters)


async def test_what_cannot_be_loaded_is_refused_and_named(base: Path, tmp_path: Path) -> None:
    small = save_tiny(tmp_path / "small", "Llama", hidden_size=24, head_dim=8)
    assert small.config.hidden_size == 24
    moe = tmp_path / "moe"
    save_tiny(moe, "Qwen3Moe", **EXPERTS, head_dim=16)
    save_adapter(tmp_path / "dir" / "good", base)
    async with serving(base, lora_dir=str(tmp_path / "dir")) as service:
        code, text = await refusal(service, "x", tmp_path / "nothing")
        assert code is grpc.StatusCode.NOT_FOUND and f"nothing is at {tmp_path}/nothing" in text
        code, text = await refusal(service, "x", "org/name")
        assert code is grpc.StatusCode.NOT_FOUND and "nothing is downloaded; name the folder of an adapter" in text
        code, text = await refusal(service, "x", save_adapter(tmp_path / "other", tmp_path / "small"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "adapter was made for" in text and "tiny/base" in text
        code, text = await refusal(service, "x", save_adapter(tmp_path / "wide", base, rank=9))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "start the executor with --max-lora-rank 9" in text
        code, text = await refusal(service, "x", save_stacked(tmp_path / "e", tmp_path / "changed", moe))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "LlamaForCausalLM has no experts" in text
        code, text = await refusal(service, "good", "")
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "has no path" in text
        assert (await load(service, "good", tmp_path / "dir" / "good")).path == str(tmp_path / "dir" / "good")
        assert [adapter.name for adapter in await listed(service)] == ["good"], "what was refused leaves nothing behind"


async def test_experts_need_memory_that_was_reserved(tmp_path: Path) -> None:
    base = tmp_path / "moe"
    save_tiny(base, "Qwen3Moe", **EXPERTS, head_dim=16)
    adapter = save_stacked(tmp_path / "a", tmp_path / "changed", base)
    async with serving(base) as service:
        code, text = await refusal(service, "x", adapter)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "start the executor with --lora-experts (" in text
    other = tmp_path / "other"
    save_tiny(other, "Qwen3Moe", **EXPERTS | {"moe_intermediate_size": 16}, head_dim=16)
    save_tiny(tmp_path / "fewer", "Qwen3Moe", **EXPERTS | {"num_experts": 4}, head_dim=16)
    async with serving(base, lora_experts=True) as service:
        assert (await load(service, "x", adapter)).rank == 3
        code, text = await refusal(service, "y", save_stacked(tmp_path / "b", tmp_path / "changed-b", other))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "64, downs 32 and 48: the adapter was made for" in text
        fewer = save_stacked(tmp_path / "c", tmp_path / "changed-c", tmp_path / "fewer")
        code, text = await refusal(service, "y", fewer)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "has 12 rows; 8 experts of rank 3 have 24" in text


async def test_an_adapter_is_loaded_once_and_its_contents_are_its_identity(base: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "a", base)
    async with serving(base, max_cpu_loras=1) as service:
        first = await load(service, "a", path)
        assert (first.name, first.path, first.rank, first.base_model) == ("a", str(path), 4, "tiny/base")
        assert await load(service, "a", path) == first, "twice"
        await load(service, "b", save_adapter(tmp_path / "b", base, seed=1))  # `a` leaves memory
        assert [adapter.name for adapter in await listed(service)] == ["a", "b"]
        save_adapter(path, base, seed=2)
        code, text = await refusal(service, "a", path, first.digest)
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "has other contents than when" in text
        second = await load(service, "a", path)
        assert second.digest != first.digest
        for digest in (first.digest, second.digest, second.digest):
            await service.stub.UnloadAdapter(executor_pb2.UnloadAdapterRequest(digest=digest))
        assert [adapter.name for adapter in await listed(service)] == ["b"]


async def test_rows_keep_an_adapter_that_is_unloaded(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "a", base)
    expected = together(start(merged(tmp_path / "merged", base, adapter)), (), [0])[0]
    async with serving(base) as service:
        digest = (await load(service, "a", adapter)).digest
        call = await opened(service)
        await call.write(
            executor_pb2.StepRequest(
                step_id=1,
                adapter_slots=[executor_pb2.AdapterSlot(slot=1, digest=digest)],
                new_requests=[
                    executor_pb2.NewRequest(
                        request_id=7,
                        token_ids=PROMPTS[0],
                        num_prompt_tokens=len(PROMPTS[0]),
                        blocks=[executor_pb2.Blocks(ids=[4, 2, 9])],
                        sampling_params=GREEDY,
                        adapter_slot=1,
                    )
                ],
                request_ids=[7],
                num_scheduled_tokens=[len(PROMPTS[0])],
                num_new_blocks=[0],
            )
        )
        tokens = list((await call.read()).token_ids)
        await service.stub.UnloadAdapter(executor_pb2.UnloadAdapterRequest(digest=digest))
        assert await listed(service) == []
        for step_id in range(2, len(expected) + 1):
            await call.write(next_step(step_id))
            tokens += (await call.read()).token_ids
        call.cancel()
    assert tokens == expected


class Reads:
    """Loads adapters, and remembers their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, slots: AdapterSlots, wanted: Adapter) -> Any:
        self.names.append(wanted.name)
        return load_adapter(slots, wanted)


@pytest.fixture
def reads() -> Reads:
    return Reads()


@pytest.fixture
def served(base: Path, tmp_path: Path, reads: Reads) -> Iterator[ServedAdapters]:
    """The adapters of an executor with memory for two."""
    adapters = (save_adapter(tmp_path / "first", base),)
    runner = start(base, adapters, enforce_eager=True, max_loras=1, max_cpu_loras=2)
    served = ServedAdapters(runner.adapters, reads)
    yield served
    served.close()


async def given(served: ServedAdapters, base: Path, path: Path) -> list[Adapter]:
    """Loads four adapters for no request; the last two are in memory."""
    paths = [save_adapter(path / name, base, seed=seed) for seed, name in enumerate("abcd")]
    return [await served.load(Adapter(name=path.name, path=str(path))) for path in paths]


async def place(served: ServedAdapters, adapter: Adapter) -> None:
    """Puts an adapter into the slot, and waits for what is read behind the step."""
    change = executor_pb2.AdapterSlot(slot=1, digest=adapter.digest)
    step = await served.attach(convert.step_from_proto(executor_pb2.StepRequest(step_id=2, adapter_slots=[change]), 67))
    held = step.slot_changes[0].adapter
    assert isinstance(held, HostAdapter) and held.digest == adapter.digest
    while ahead := [task for task in asyncio.all_tasks() if task.get_name() == "read adapters"]:
        await asyncio.wait(ahead)


async def test_steps_find_the_adapters_of_their_requests_in_memory(
    served: ServedAdapters, reads: Reads, base: Path, tmp_path: Path
) -> None:
    a, b, c, _ = await given(served, base, tmp_path)
    for adapter in (a, b, c):
        await served.load(adapter)
    assert reads.names == [*"abcd", *"abc"], "as many as fit stay, the first first"
    await place(served, a)
    assert reads.names[7:] == ["c"], "read behind the step, as `a` may leave memory"
    await place(served, b)
    await place(served, c)
    assert len(reads.names) == 8


async def test_requests_that_ended_keep_no_adapter_in_memory(
    served: ServedAdapters, reads: Reads, base: Path, tmp_path: Path
) -> None:
    a, b, c, d = await given(served, base, tmp_path)
    for ended in (a, b):
        await served.load(ended)
    await served.load(c)
    await place(served, c)
    assert reads.names[4:] == [*"abcc"], "a step waits once"
    await served.load(d)
    await place(served, d)
    assert reads.names[8:] == ["d"]


async def test_an_adapter_that_changed_while_its_request_waited(
    served: ServedAdapters, reads: Reads, base: Path, tmp_path: Path
) -> None:
    a, b, c, _ = await given(served, base, tmp_path)
    for adapter in (a, b, c):
        await served.load(adapter)
    save_adapter(Path(c.path), base, seed=9)
    await place(served, a)
    change = executor_pb2.AdapterSlot(slot=1, digest=c.digest)
    request = executor_pb2.NewRequest(
        request_id=3, token_ids=[5], num_prompt_tokens=1, sampling_params=GREEDY, adapter_slot=1
    )
    message = executor_pb2.StepRequest(step_id=3, adapter_slots=[change], new_requests=[request])
    step = await served.attach(convert.step_from_proto(message, 67))
    (failed,) = step.new_requests
    assert failed.adapter_slot == 0 and failed.failure is not None
    assert "has other contents than when the adapter was loaded" in failed.failure.message


@pytest.mark.parametrize(
    ("error", "lasts"),
    [(PermissionError(13, "Permission denied"), True), (OSError(116, "Stale file handle"), False)],
)
async def test_a_problem_of_the_disk_may_pass_and_others_last(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, lasts: bool
) -> None:
    directory = tmp_path / "adapters"
    save_adapter(directory / "x", base)
    read = Path.read_bytes

    def failing_read(path: Path) -> bytes:
        if path.is_relative_to(directory):
            raise error
        return read(path)

    async def found(service: Service) -> executor_pb2.FoundAdapter:
        (one,) = (await service.stub.Describe(executor_pb2.DescribeRequest())).found_adapters
        return one

    async with serving(base, lora_dir=str(directory)) as service:
        with monkeypatch.context() as failing:
            failing.setattr(Path, "read_bytes", failing_read)
            code, why = await refusal(service, "x", directory / "x")
        assert code is grpc.StatusCode.INVALID_ARGUMENT and str(error.strerror) in why
        assert str(error.strerror) in (await found(service)).problem
        with monkeypatch.context() as later:
            later.setattr(directory_module.time, "monotonic", lambda: float(1 << 40))
            assert bool((await found(service)).problem) == lasts
        assert (await load(service, "x", directory / "x")).digest == (await found(service)).digest
