"""The state of a process that is about to end, which its neighbours learn at once."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Finishable(Protocol):
    async def finish(self) -> None:
        """Returns once the stream has written the outputs that it holds, and ends."""


class Draining:
    """The draining of this process: running requests continue, and neighbours send new ones elsewhere, if they can."""

    def __init__(self) -> None:
        self.has_begun = False
        self.on_begin: set[Callable[[], None]] = set()
        self.is_finishing = False
        self.streams: set[Finishable] = set()  # of neighbours, from the greeting to the end

    def begin(self) -> None:
        self.has_begun = True
        for notify in list(self.on_begin):
            notify()

    async def finish_streams(self) -> None:
        """Returns once all streams have written the outputs that they hold: those of requests that have ended here are
        lost otherwise. Takes as long as the slowest reader. New streams are not greeted, so that they carry no request.
        """
        self.is_finishing = True
        await asyncio.gather(*(stream.finish() for stream in self.streams))
