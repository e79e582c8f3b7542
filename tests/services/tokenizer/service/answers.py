"""Statuses of calls, as tests read them."""

import grpc
import pytest
from grpc_status import rpc_status

TEXT = "Hello 👍🏽 world, the end.\nAnd 北京 more END of it"


async def code_of(awaitable) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code(), caught.value.details()


async def read_all(call) -> None:
    async for _ in call:
        pass


def details_of(error: grpc.aio.AioRpcError, kind: type) -> list:
    """The details of this kind that a status has, as clients with grpcio-status read them."""
    found = []
    for detail in rpc_status.from_call(error).details:
        message = kind()
        found += [message] if detail.Unpack(message) else []
    return found
