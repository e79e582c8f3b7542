"""Runs the lines of a batch: several at once, with retries while the server is full, until each has a result."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from pagewire.batch.lines import Line
from pagewire.batch.results import Answer, Results

# Statuses of a server that is full or unreachable; the same request may succeed later.
_LATER = (429, 503)
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0


class Away(Exception):
    """Raised when the server cannot be reached, or the connection broke."""


Call = Callable[[Line], Awaitable[Answer]]
"""Sends a request to a server. May raise Away."""


class Runner:
    def __init__(self, call: Call, results: Results, room: asyncio.Semaphore, *, away_timeout: float) -> None:
        """room: the number of requests in flight, which runners may share. away_timeout: seconds without any answer
        from the server after which run() gives up."""
        self._call = call
        self._results = results
        self._room = room
        self._away_timeout = away_timeout
        self._stopping = asyncio.Event()
        self._answered = time.monotonic()

    def stop(self) -> None:
        """Starts no further lines. Those in flight finish, unless they would have to wait for a retry."""
        self._stopping.set()

    async def run(self, lines: AsyncIterator[Line], concurrency: int) -> bool:
        """Runs all lines, and returns whether each has a result, which may be false after stop().

        Raises Away after away_timeout, and OSError if results cannot be written.
        """
        turn = asyncio.Lock()

        async def work() -> None:
            while not self._stopping.is_set():
                async with turn:
                    line = await anext(lines, None)
                if line is None:
                    return
                answer = await self._ask(line)
                if answer is not None:
                    await asyncio.to_thread(self._results.add, line, answer)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
        except ExceptionGroup as errors:  # the first error has cancelled the other tasks
            raise errors.exceptions[0] from None
        return not self._stopping.is_set()

    async def _ask(self, line: Line) -> Answer | None:
        """Returns the answer to a line; None if there is none because run() stops."""
        backoff = MIN_BACKOFF_S
        while True:
            delay = backoff
            try:
                async with self._room:
                    answer = await self._call(line)
            except Away:
                if time.monotonic() - self._answered > self._away_timeout:
                    raise
            else:
                self._answered = time.monotonic()
                if answer.status not in _LATER:
                    return answer
                delay = max(delay, answer.retry_after)
            if await self._stopped_within(delay * random.uniform(0.5, 1)):
                return None
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True
