"""Reads the lists of a discovery, as services do."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pagewire.wire.discovery import Discovery, Listed


class Followed:
    """The lists that a discovery has yielded."""

    def __init__(self) -> None:
        self.lists: list[Sequence[Listed]] = []

    @property
    def addresses(self) -> list[str] | None:
        """The addresses of the last list; None before the first."""
        return [one.address for one in self.lists[-1]] if self.lists else None

    async def until(self, *addresses: str) -> None:
        """Waits until the last list has these addresses."""
        async with asyncio.timeout(10):
            while self.addresses != list(addresses):  # noqa: ASYNC110 - the state of the other side
                await asyncio.sleep(0.005)


@asynccontextmanager
async def followed(discovery: Discovery) -> AsyncIterator[Followed]:
    seen = Followed()

    async def follow() -> None:
        async for listed in discovery.lists():
            seen.lists.append(listed)

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
