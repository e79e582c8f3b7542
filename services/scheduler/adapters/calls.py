"""The calls to executors about adapters. They raise grpc.aio.AioRpcError."""

from typing import NamedTuple

import grpc

from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Adapter, FoundAdapter
from pagewire.v1 import executor_pb2
from pagewire.v1.executor_pb2_grpc import ExecutorServiceStub

_LOOK_TIMEOUT_S = 10.0


class Look(NamedTuple):
    """The directory of an executor, and the adapters in it."""

    replica_id: int
    directory: str
    found: list[FoundAdapter]


async def load(driver: ReplicaDriver, adapter: Adapter) -> Adapter:
    """Makes an executor read an adapter into its memory; returns it as it is."""
    request = executor_pb2.LoadAdapterRequest(adapter=convert.from_adapter(adapter))
    return convert.to_adapter((await ExecutorServiceStub(driver.channel).LoadAdapter(request)).adapter)


async def unload(driver: ReplicaDriver, digest: str, name: str) -> None:
    """Makes an executor forget contents, under one name or all of them, or without a digest only the name."""
    request = executor_pb2.UnloadAdapterRequest(digest=digest, name=name)
    await ExecutorServiceStub(driver.channel).UnloadAdapter(request)


async def look_at(driver: ReplicaDriver) -> Look | None:
    """Returns what an executor sees; None: it does not answer."""
    stub = ExecutorServiceStub(driver.channel)
    try:
        info = convert.to_executor_info(await stub.Describe(executor_pb2.DescribeRequest(), timeout=_LOOK_TIMEOUT_S))
    except grpc.aio.AioRpcError:
        return None
    return Look(driver.replica.replica_id, info.adapter_directory, list(info.found_adapters))
