"""Asks executors what lies in their `--lora-dir`."""

from typing import NamedTuple

import grpc

from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import FoundAdapter
from pagewire.v1 import executor_pb2, executor_pb2_grpc

_TIMEOUT_S = 10.0


class Look(NamedTuple):
    """The directory of an executor, and the adapters in it."""

    replica_id: int
    directory: str
    found: list[FoundAdapter]


async def look_at(driver: ReplicaDriver) -> Look | None:
    """Returns what an executor sees; None: it does not answer."""
    stub = executor_pb2_grpc.ExecutorServiceStub(driver.channel)
    try:
        info = convert.to_executor_info(await stub.Describe(executor_pb2.DescribeRequest(), timeout=_TIMEOUT_S))
    except grpc.aio.AioRpcError:
        return None
    return Look(driver.replica.replica_id, info.adapter_directory, list(info.found_adapters))
