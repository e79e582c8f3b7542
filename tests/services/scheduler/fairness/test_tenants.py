"""Tenants at the scheduler's port for clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pagewire.services.scheduler.main import make_public_server
from pagewire.v1 import scheduler_pb2_grpc
from pagewire.wire import rpc
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.services.scheduler.service_line import ServiceLine, generate_request

FLOOD, OTHER = 1, 900  # first tokens of prompts


@asynccontextmanager
async def public_stub(
    directory: Path, **config: str
) -> AsyncIterator[tuple[ServiceLine, scheduler_pb2_grpc.SchedulerServiceStub]]:
    executor = FakeExecutorServicer(lambda: FakeExecutor(max_num_seqs=1, num_blocks=1024), step_seconds=0.002)
    config |= {"public_listen": f"unix:{directory}/public.sock"}
    async with ServiceLine(directory, executor, max_queue_time=0, **config).running() as line:
        await line.wait_for_executors(1)
        server = make_public_server(line.config, line.engine)
        await server.start()
        async with rpc.channel(line.config.public_listen) as channel:
            yield line, scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await server.stop()


async def ask(stub: scheduler_pb2_grpc.SchedulerServiceStub, first: int, tenant: str, max_tokens: int = 3) -> None:
    request = generate_request([first, 2, 3], max_tokens=max_tokens, ignore_eos=True)
    async for _ in stub.Generate(request, metadata=[("x-tenant-id", tenant)]):
        pass


async def flood(line: ServiceLine, stub: scheduler_pb2_grpc.SchedulerServiceStub) -> list[asyncio.Task[None]]:
    """One request of a tenant runs for long, and 10 wait."""
    asking = [asyncio.create_task(ask(stub, FLOOD, "flood", 1000))]
    async with asyncio.timeout(10):
        while not line.executor.new_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    asking += [asyncio.create_task(ask(stub, FLOOD, "flood")) for _ in range(10)]
    await line.wait_for_waiting(10)
    return asking


def prompts(line: ServiceLine) -> list[int]:
    """First tokens, as the executor got them."""
    return [new.token_ids[0] for new in line.executor.new_requests]


async def test_a_tenants_flood_lets_anothers_request_pass(tmp_path: Path) -> None:
    async with public_stub(tmp_path, tenant_header="X-Tenant-ID") as (line, stub):
        asking = await flood(line, stub)
        await ask(stub, OTHER, "other")
        assert prompts(line)[:2] == [FLOOD, OTHER], "next after the one that ran when it came"
        await rpc.cancel(asking)


async def test_who_is_not_believed_waits_for_all(tmp_path: Path) -> None:
    async with public_stub(tmp_path) as (line, stub):
        asking = await flood(line, stub)
        last = asyncio.create_task(ask(stub, OTHER, "other"))
        await line.wait_for_waiting(11)
        asking[0].cancel()
        await asyncio.gather(*asking[1:], last)
        assert prompts(line).index(OTHER) == 11


@pytest.mark.parametrize("names", [[""], ["x" * 129], ["a", "a"]])
async def test_a_wrong_name_is_refused(tmp_path: Path, names: list[str]) -> None:
    async with public_stub(tmp_path, tenant_header="X-Tenant-ID") as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="X-Tenant-ID names a tenant") as raised:
            await stub.Generate(generate_request([1]), metadata=[("x-tenant-id", name) for name in names]).read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("sharing", "cached"), [("tenant", [0, 0, 0, 16, 16, 16, 0, 0, 16]), ("all", [0, 16, 16, 16, 16, 16, 0, 16, 16])]
)
async def test_what_others_have_asked_is_not_found_in_the_cache(
    tmp_path: Path, sharing: str, cached: list[int]
) -> None:
    asked = [
        ("a", ""),
        ("b", ""),
        ("", ""),
        ("a", ""),
        ("b", ""),
        ("", ""),
        ("a", "mine"),
        ("b", "mine"),
        ("a", "mine"),
    ]
    found = []
    async with public_stub(tmp_path, tenant_header="X-Tenant-ID", prefix_cache_sharing=sharing) as (_, stub):
        for tenant, salt in asked:
            request = generate_request(range(1, 21), max_tokens=2, cache_salt=salt)
            metadata = [("x-tenant-id", tenant)] if tenant else []
            responses = [response async for response in stub.Generate(request, metadata=metadata)]
            found.append(responses[-1].usage.cached_tokens)
    assert found == cached
