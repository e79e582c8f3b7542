"""GetStatus: the scheduler, its replicas and their KV blocks."""

import asyncio
from itertools import chain, repeat
from pathlib import Path

from pagewire.services.scheduler.service import status as scheduler_status
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.v1.admin_pb2 import KVBlockState, KVGroupStatus, ServiceState
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.services.scheduler.service_line import ServiceLine, generate_request

FREE, CACHED = KVBlockState.KV_BLOCK_STATE_FREE, KVBlockState.KV_BLOCK_STATE_CACHED
USED, SHARED = KVBlockState.KV_BLOCK_STATE_USED, KVBlockState.KV_BLOCK_STATE_SHARED
NUM_BLOCKS = 64


def make_line(tmp_path: Path, num_replicas: int = 1, step_seconds: float = 0.0) -> ServiceLine:
    executors = (
        FakeExecutorServicer(lambda: FakeExecutor(num_blocks=NUM_BLOCKS), step_seconds=step_seconds)
        for _ in range(num_replicas)
    )
    return ServiceLine(tmp_path, *executors)


async def services_of(line: ServiceLine, *, with_kv_maps: bool = True) -> list[admin_pb2.ServiceStatus]:
    admin = admin_pb2_grpc.AdminServiceStub(line.channel)
    return list((await admin.GetStatus(admin_pb2.GetStatusRequest(with_kv_maps=with_kv_maps))).services)


async def group_of(line: ServiceLine) -> KVGroupStatus:
    return (await services_of(line))[0].scheduler.replicas[0].kv_groups[0]


def cells(group: KVGroupStatus) -> list[int]:
    return list(chain.from_iterable(repeat(run.state, run.num_cells) for run in group.map))


def assert_map_agrees(group: KVGroupStatus) -> None:
    shown = cells(group)
    assert len(shown) == group.num_blocks == NUM_BLOCKS and group.blocks_per_cell == 1
    assert shown.count(FREE) == group.num_free and shown.count(CACHED) == group.num_cached
    assert shown.count(SHARED) == group.num_shared
    assert shown.count(USED) + shown.count(SHARED) == group.num_used
    assert group.num_free + group.num_cached + group.num_used == NUM_BLOCKS


async def test_the_map_shows_free_cached_used_and_shared_blocks(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.005).running() as line:
        await line.wait_for_executor(present=True)
        assert cells(await group_of(line)) == [FREE] * NUM_BLOCKS
        before = (await services_of(line))[0].scheduler  # counters are the process's
        block_size = (await group_of(line)).block_size
        prompt = list(range(3 * block_size + 1))
        async for _ in line.stub.Generate(generate_request(prompt, max_tokens=1)):
            pass
        await line.wait_until_free()
        group = await group_of(line)
        assert_map_agrees(group)
        assert group.num_cached >= 3 and group.num_used == 0

        calls = [line.stub.Generate(generate_request(prompt, max_tokens=500, ignore_eos=True)) for _ in range(2)]
        for call in calls:
            await call.read()
        group = await group_of(line)
        assert_map_agrees(group)
        assert group.num_shared == 3 and group.num_used > 3
        status = (await services_of(line))[0].scheduler
        assert status.num_running == 2
        assert status.num_prefix_hits - before.num_prefix_hits >= 6 * block_size
        assert status.num_prompt_tokens - before.num_prompt_tokens == 3 * len(prompt)
        assert status.num_generation_tokens - before.num_generation_tokens >= 3
        for call in calls:
            call.cancel()
        await line.wait_until_free()
        group = await group_of(line)
        assert_map_agrees(group)
        assert group.num_shared == group.num_used == 0


async def test_a_map_of_many_blocks_shows_some_of_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(scheduler_status, "MAX_CELLS", 10)
    async with make_line(tmp_path).running() as line:
        await line.wait_for_executor(present=True)
        group = await group_of(line)
        assert group.blocks_per_cell == 7 and len(cells(group)) == 10
        without = (await services_of(line, with_kv_maps=False))[0].scheduler.replicas[0].kv_groups[0]
        assert without.num_free == NUM_BLOCKS and not without.map and not without.blocks_per_cell


async def test_an_executor_that_is_gone_is_unreachable_and_its_replica_detached(tmp_path: Path) -> None:
    async with make_line(tmp_path, num_replicas=2).running() as line:
        await line.wait_for_executors(2)
        states = [(one.service, one.state) for one in await services_of(line)]
        serving, unreachable = ServiceState.SERVICE_STATE_SERVING, ServiceState.SERVICE_STATE_UNREACHABLE
        assert states == [("scheduler", serving), ("executor", serving), ("executor", serving)]
        await line.kill_executor(1)
        await line.wait_for_executors(1)
        scheduler, first, second = await asyncio.wait_for(services_of(line), 10)
        assert (scheduler.state, first.state, second.state) == (serving, serving, unreachable)
        assert second.address == line.executor_addresses[1] and second.detail and first.pid
        assert [replica.is_attached for replica in scheduler.scheduler.replicas] == [True, False]
