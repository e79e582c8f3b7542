"""The calls to executors about adapters. They raise grpc.aio.AioRpcError, also if an executor's channel is closed
meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import grpc

from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Adapter, FoundAdapter
from pagewire.v1 import executor_pb2
from pagewire.v1.executor_pb2_grpc import ExecutorServiceStub

_LOOK_TIMEOUT_S = 10.0
_T = TypeVar("_T")


class Look(NamedTuple):
    """The directory of an executor, and the adapters in it."""

    replica_id: int
    directory: str
    found: list[FoundAdapter]


async def _answer(driver: ReplicaDriver, call: Callable[[ExecutorServiceStub], Awaitable[_T]]) -> _T:
    try:
        return await call(ExecutorServiceStub(driver.channel))
    except (asyncio.CancelledError, grpc.aio.UsageError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        nothing = grpc.aio.Metadata()
        what = "its channel was closed, as it is no longer listed"
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, what) from error


async def load(driver: ReplicaDriver, adapter: Adapter) -> Adapter:
    """Makes an executor read an adapter into its memory; returns it as it is."""
    request = executor_pb2.LoadAdapterRequest(adapter=convert.from_adapter(adapter))
    return convert.to_adapter((await _answer(driver, lambda stub: stub.LoadAdapter(request))).adapter)


async def unload(driver: ReplicaDriver, digest: str, name: str) -> None:
    """Makes an executor forget contents, under one name or all of them, or without a digest only the name."""
    request = executor_pb2.UnloadAdapterRequest(digest=digest, name=name)
    await _answer(driver, lambda stub: stub.UnloadAdapter(request))


async def look_at(driver: ReplicaDriver) -> Look | None:
    """Returns what an executor sees; None: it does not answer."""
    request = executor_pb2.DescribeRequest()
    try:
        answer = await _answer(driver, lambda stub: stub.Describe(request, timeout=_LOOK_TIMEOUT_S))
    except grpc.aio.AioRpcError:
        return None
    info = convert.to_executor_info(answer)
    return Look(driver.replica.replica_id, info.adapter_directory, list(info.found_adapters))
