"""The shutdown of the gateway."""

import asyncio

from pagewire.gateway.core.app_state import AppState


class GracefulShutdown:
    """The state of the shutdown, and the number of requests in flight."""

    def __init__(self) -> None:
        self.announced = False  # not ready for balancers, but still accepts connections
        self.begun = False  # accepts no connections; requests of those that it has are answered, and what lasts ends
        self.over = False  # what still runs is cut off
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def request_begins(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def request_ends(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


SHUTDOWN = AppState[GracefulShutdown]("shutdown")
