"""Tenants at the scheduler's port for clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pagewire import rpc
from pagewire.services.scheduler.main import make_public_server
from pagewire.v1 import scheduler_pb2_grpc
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.services.scheduler.service_line import ServiceLine, generate_request

FLOOD, OTHER = 1, 900  # first tokens of prompts


@asynccontextmanager
async def public_stub(
    directory: Path, **config: str
) -> AsyncIterator[tuple[ServiceLine, scheduler_pb2_grpc.SchedulerServiceStub]]:
    executor = FakeExecutorServicer(lambda: FakeExecutor(max_num_seqs=1), step_seconds=0.002)
    config |= {"public_listen": f"unix:{directory}/public.sock"}
    async with ServiceLine(directory, executor, **config).running() as line:
        await line.wait_for_executors(1)
        server = make_public_server(line.config, line.engine)
        await server.start()
        async with rpc.channel(line.config.public_listen) as channel:
            yield line, scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await server.stop()


async def order_of_prompts(directory: Path, **config: str) -> list[int]:
    """First tokens of the prompts, as the executor gets them: 10 requests of one tenant wait, then another's comes."""
    async with public_stub(directory, **config) as (line, stub):

        async def ask(first: int, tenant: str, max_tokens: int = 3) -> None:
            request = generate_request([first, 2, 3], max_tokens=max_tokens, ignore_eos=True)
            async for _ in stub.Generate(request, metadata=[("x-tenant-id", tenant)]):
                pass

        asking = [asyncio.create_task(ask(FLOOD, "flood", 100))]
        asking += [asyncio.create_task(ask(FLOOD, "flood")) for _ in range(10)]
        await line.wait_for_waiting(10)
        asking.append(asyncio.create_task(ask(OTHER, "other")))
        await line.wait_for_waiting(11)
        await asyncio.gather(*asking)
        return [new.prompt_token_ids[0] for new in line.executor.new_requests]


async def test_a_tenants_flood_lets_anothers_request_pass(tmp_path: Path) -> None:
    order = await order_of_prompts(tmp_path, tenant_header="X-Tenant-ID")
    assert order.index(OTHER) == 1, "next after the one that ran when it came"


async def test_who_is_not_believed_waits_for_all(tmp_path: Path) -> None:
    assert (await order_of_prompts(tmp_path)).index(OTHER) == 11


@pytest.mark.parametrize("names", [[""], ["x" * 129], ["a", "a"]])
async def test_a_wrong_name_is_refused(tmp_path: Path, names: list[str]) -> None:
    async with public_stub(tmp_path, tenant_header="X-Tenant-ID") as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="X-Tenant-ID names a tenant") as raised:
            await stub.Generate(generate_request([1]), metadata=[("x-tenant-id", name) for name in names]).read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
