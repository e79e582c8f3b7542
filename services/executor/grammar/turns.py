"""The order in which grammars are compiled."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Lets one at a time go on, the smallest of those that wait first: large grammars, which take long, then delay
    small ones by no more than one of them. A size that waits and is cancelled gives its turn to the next."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = itertools.count()
        self._is_taken = False

    @asynccontextmanager
    async def of(self, size: int) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the context."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (size, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
