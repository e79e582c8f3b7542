"""A generation that one task composes of several requests to the scheduler."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pagewire.services.tokenizer.generation.live_generations import LiveGenerations
from pagewire.services.tokenizer.received import Received
from pagewire.wire.rpc import RpcError


@contextmanager
def composing(live: LiveGenerations, received: Received) -> Iterator[None]:
    """Combines the requests that the present task submits into one generation: a shutdown waits for the end of the
    block, and the generation's id ends it.

    Raises RpcError (ABORTED) if the generation is ended by its id.
    """
    task = asyncio.current_task()
    assert task is not None
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    composed = _Composed(received, task)
    live.add(composed, over)
    try:
        yield
    except asyncio.CancelledError as error:
        if composed.was_ended and not task.uncancel():
            raise RpcError(grpc.StatusCode.ABORTED, "the request was ended by its id") from error
        raise
    finally:
        composed.is_over = True
        over.set_result(None)


class _Composed:
    def __init__(self, received: Received, task: asyncio.Task[Any]) -> None:
        self.request_id = received.request.request_id
        self.tenant = received.context.tenant
        self._task = task
        self.is_over = False
        self.was_ended = False

    def end_early(self) -> bool:
        """Cancels the task, as there is no output yet. Returns False if the generation had already ended."""
        if self.is_over or self.was_ended:
            return False
        self.was_ended = True
        self._task.cancel()
        return True
