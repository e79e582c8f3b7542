"""Calls to an executor that is no longer listed: its channel is closed while they wait."""

import asyncio
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from pagewire.services.scheduler.adapters import calls
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Adapter


async def test_a_closed_channel_is_an_executor_that_is_lost() -> None:
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)  # never answers
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    driver = cast(ReplicaDriver, SimpleNamespace(channel=channel, replica=SimpleNamespace(replica_id=0)))
    waiting = [
        asyncio.create_task(calls.load(driver, Adapter("x", "/x"))),
        asyncio.create_task(calls.unload(driver, "", "x")),
    ]
    looking = asyncio.create_task(calls.look_at(driver))
    await asyncio.sleep(0)
    await channel.close()
    assert await looking is None and await calls.look_at(driver) is None
    for call in waiting:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    server.close()


async def test_a_cancelled_call_stays_cancelled() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    driver = cast(ReplicaDriver, SimpleNamespace(channel=channel))
    call = asyncio.create_task(calls.load(driver, Adapter("x", "/x")))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await channel.close()
