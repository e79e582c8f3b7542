"""Work about adapters that goes on beside steps."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Tasks:
    """Keeps tasks until they are done. An RpcError is the result of its caller; any other error is logged."""

    def __init__(self) -> None:
        self._tasks = set[asyncio.Task[Any]]()

    def start(self, work: Coroutine[Any, Any, _Result]) -> "asyncio.Task[_Result]":
        task = asyncio.create_task(work, name="adapters")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RpcError):
            logger.error("work about adapters has failed", exc_info=error)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
