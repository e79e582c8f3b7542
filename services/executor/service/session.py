"""A scheduler's stream of steps, as the worker sees it, and its possible ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from pagewire.services.executor.device.clock import Clock
from pagewire.services.executor.service.failure_watch import FailureWatch
from pagewire.v1 import executor_pb2
from pagewire.wire.local.pipe import ThreadWriter

# The result of a step, or the end of the session: an error, or None if it was closed and all results were before it.
Outcome = executor_pb2.StepResult | Exception | None
# Called on the worker's threads, by one at a time, with each result in step order, then once with the end.
Deliver = Callable[[Outcome], None]


class StepFailed(RuntimeError):
    """A step failed, possibly because of a request in it. The executor continues with empty rows."""

    code = grpc.StatusCode.UNKNOWN


@dataclass(eq=False)
class Session:
    """One Execute stream. Opening one ends the previous one and empties all rows."""

    deliver: Deliver
    last_step_id: int = 0
    last_clock: Clock | None = None  # of the last step that was returned
    failures: FailureWatch = field(default_factory=FailureWatch)
    is_over: bool = False  # only its end is still delivered


class Results:
    """Results in step order, then one end. The worker writes a result itself if it can; one that the event loop writes
    holds up those after it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, writer: ThreadWriter | None) -> None:
        """writer: None if the stream has none."""
        self._loop = loop
        self._writer = writer
        self._items = asyncio.Queue[Outcome]()
        self._num_queued = 1  # by deliver(); the first is the message that opens the stream
        self._num_written = 0
        self._large_steps = set[int]()
        self._delivering = threading.Lock()

    def deliver(self, item: Outcome) -> None:
        """Sends an item. Called on the worker's threads, and on those that load blocks."""
        with self._delivering:
            if self._may_write(item) and self._writer is not None and self._writer.try_write(item):
                return
            self._num_queued += 1
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def _may_write(self, item: Outcome) -> bool:
        return (
            isinstance(item, executor_pb2.StepResult)
            and self._num_queued == self._num_written
            and item.step_id not in self._large_steps
        )

    def put(self, item: Outcome) -> None:
        """Appends an item. Called in the event loop."""
        self._items.put_nowait(item)

    async def next(self) -> Outcome:
        """Waits for the next item that the event loop has to send; the one before it is written."""
        self._num_written += 1
        return await self._items.get()

    def expect_large(self, step_id: int) -> None:
        """Announces a step that takes much memory; the C library would keep all of it, separately for each size."""
        self._large_steps.add(step_id)

    def was_large(self, result: executor_pb2.StepResult) -> bool:
        """Returns whether a result is that of a large step, once."""
        is_large = result.step_id in self._large_steps
        self._large_steps.discard(result.step_id)
        return is_large
