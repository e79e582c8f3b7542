"""The calls to one executor about its tiers: what they hold, and what they are to forget."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from pagewire.services.scheduler.tiers.contents import TierContents
from pagewire.v1.executor_pb2 import BlockHashes, ForgetBlocksRequest, WatchTiersRequest
from pagewire.v1.executor_pb2_grpc import ExecutorServiceStub
from pagewire.wire.streams import MAX_BACKOFF_S

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_FORGET_TIMEOUT_S = 10.0


class TierCalls:
    """The calls that go on while an executor is attached; `stop` ends them."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        """address: for the log."""
        self._stub = ExecutorServiceStub(channel)
        self._address = address
        self._tasks = set[asyncio.Task[None]]()
        self._first_attempts = set[asyncio.Future[str]]()  # of forgetting, without an outcome

    def watch(self, contents: TierContents) -> None:
        """Keeps contents up to date."""
        self._start(self._watch(contents))

    async def _watch(self, contents: TierContents) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            contents.clear()
            try:
                async for changes in self._stub.WatchTiers(WatchTiersRequest(), wait_for_ready=True):
                    contents.apply(changes)
                    backoff = _FIRST_BACKOFF_S
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    logger.warning("the executor at %s does not say what its tiers hold", self._address)
                    return
                logger.debug("the executor at %s no longer says what its tiers hold: %s", self._address, error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    def forget(
        self, blocks: Sequence[BlockHashes] | None, on_forgotten: Callable[[], None], reset_at: int = 0
    ) -> "asyncio.Future[str]":
        """Makes the tiers forget blocks (None: all, by a reset of this time), and calls back when they have. Returns
        why the first attempt has failed, after which others follow; empty: it has not."""
        first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._first_attempts.add(first)
        first.add_done_callback(self._first_attempts.discard)
        self._start(self._forget(ForgetBlocksRequest(blocks=blocks or (), reset_at=reset_at), first, on_forgotten))
        return first

    async def _forget(
        self,
        request: ForgetBlocksRequest,
        first: "asyncio.Future[str]",
        on_forgotten: Callable[[], None],
    ) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                await self._stub.ForgetBlocks(request, timeout=_FORGET_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if not first.done():
                    first.set_result(error.details() or error.code().name)
                    logger.warning(
                        "the executor at %s has not forgotten KV blocks in its tiers (%s); trying again, and nothing is"
                        " loaded there until it has",
                        self._address,
                        error.details(),
                    )
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
            else:
                if not first.done():
                    first.set_result("")
                on_forgotten()
                return

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._run(work), name="tiers")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except grpc.aio.UsageError:
            logger.debug("the channel to the executor at %s was closed", self._address)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for first in list(self._first_attempts):
            first.set_result("the connection was lost")
