"""Reads what a discovery says, as services do."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pagewire.wire.discovery import Discovery, Listed


class Followed:
    """The lists so far."""

    def __init__(self) -> None:
        self.lists: list[Sequence[Listed]] = []

    @property
    def addresses(self) -> list[str] | None:
        """Of the last one; None: there was none yet."""
        return [one.address for one in self.lists[-1]] if self.lists else None

    async def until(self, *addresses: str) -> None:
        """Until the list is this."""
        async with asyncio.timeout(10):
            while self.addresses != list(addresses):  # noqa: ASYNC110 - the state of the other side
                await asyncio.sleep(0.005)


@asynccontextmanager
async def followed(discovery: Discovery) -> AsyncIterator[Followed]:
    told = Followed()

    async def follow() -> None:
        async for listed in discovery.lists():
            told.lists.append(listed)

    task = asyncio.create_task(follow())
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
