"""The prefix caches of all schedulers, as a tokenizer service offers them to operators."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import grpc

from pagewire.v1 import admin_pb2_grpc
from pagewire.v1.admin_pb2 import (
    ResetPrefixCacheRequest,
    ResetPrefixCacheResponse,
    SubscribeKvEventsRequest,
    SubscribeKvEventsResponse,
)
from pagewire.wire.admin import Neighbour
from pagewire.wire.status.rpc_error import RpcError


class CachesBehind:
    """Asks all services behind this one."""

    def __init__(self, behind: Callable[[], Sequence[Neighbour]]) -> None:
        """behind: returns the current neighbours."""
        self._behind = behind

    async def reset(self, request: ResetPrefixCacheRequest) -> ResetPrefixCacheResponse:
        """Resets at all neighbours at the same time, and returns the sums. Raises RpcError if one fails."""
        answers = await asyncio.gather(*(_reset_at(one, request) for one in self._neighbours()))
        return ResetPrefixCacheResponse(
            num_blocks=sum(answer.num_blocks for answer in answers),
            num_executors=sum(answer.num_executors for answer in answers),
        )

    async def subscribe(self, request: SubscribeKvEventsRequest) -> AsyncGenerator[SubscribeKvEventsResponse]:
        """Yields the messages of all neighbours. Raises RpcError when the first stream ends."""
        # One message: a slow subscriber is noticed by the scheduler, which bounds what waits for it.
        found = asyncio.Queue[SubscribeKvEventsResponse | RpcError](maxsize=1)
        pumps = [asyncio.create_task(_pump(one, request, found.put), name="kv events") for one in self._neighbours()]
        try:
            while not isinstance(message := await found.get(), RpcError):
                yield message
            raise message
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    def _neighbours(self) -> Sequence[Neighbour]:
        if not (neighbours := self._behind()):
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "no scheduler is available; try again later")
        return neighbours


async def _reset_at(neighbour: Neighbour, request: ResetPrefixCacheRequest) -> ResetPrefixCacheResponse:
    try:
        return await admin_pb2_grpc.AdminServiceStub(neighbour.channel).ResetPrefixCache(request)
    except grpc.aio.AioRpcError as error:
        raise _named(neighbour, error) from error


async def _pump(
    neighbour: Neighbour,
    request: SubscribeKvEventsRequest,
    put: Callable[[SubscribeKvEventsResponse | RpcError], Awaitable[None]],
) -> None:
    """Passes the messages of a neighbour on, and then why they ended."""
    try:
        async for message in admin_pb2_grpc.AdminServiceStub(neighbour.channel).SubscribeKvEvents(request):
            await put(message)
    except grpc.aio.AioRpcError as error:
        await put(_named(neighbour, error))
    else:
        await put(RpcError(grpc.StatusCode.UNAVAILABLE, f"the scheduler at {neighbour.address} ended; subscribe again"))


def _named(neighbour: Neighbour, error: grpc.aio.AioRpcError) -> RpcError:
    found = RpcError.from_call(error)
    return RpcError(found.code, f"the scheduler at {neighbour.address}: {found.message}", found.violations)
