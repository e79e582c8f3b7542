"""Runs the lines of a batch: so many at once, again while the server has no room for one, each to one result."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from pagewire.batch.lines import Line
from pagewire.batch.results import Answer, Results

# Statuses of a server that is full or away; the same request may be answered later.
_LATER = (429, 503)
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0


class Away(Exception):
    """The server cannot be reached, or broke off."""


Call = Callable[[Line], Awaitable[Answer]]
"""Asks a server. May raise Away."""


class Runner:
    def __init__(self, call: Call, results: Results, room: asyncio.Semaphore, *, away_timeout: float) -> None:
        """room: for so many requests at once, which runners may share. away_timeout: seconds without any answer from
        the server after which run() gives up."""
        self._call = call
        self._results = results
        self._room = room
        self._away_timeout = away_timeout
        self._stopping = asyncio.Event()
        self._answered = time.monotonic()

    def stop(self) -> None:
        """Begins no further line. Those that were begun end as they do, unless they would have to wait."""
        self._stopping.set()

    async def run(self, lines: AsyncIterator[Line], concurrency: int) -> bool:
        """Runs all lines, and returns whether each has a result; after stop(), some may have none.

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
        except ExceptionGroup as errors:  # the first one has cancelled the others
            raise errors.exceptions[0] from None
        return not self._stopping.is_set()

    async def _ask(self, line: Line) -> Answer | None:
        """None: there is none, and run() is to stop."""
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
