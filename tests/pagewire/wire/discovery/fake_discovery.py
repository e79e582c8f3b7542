"""A discovery that lists what a test gives it."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from pagewire.wire.discovery import Listed


class FakeDiscovery:
    """The services at the addresses of the last `publish`."""

    def __init__(self, *addresses: str) -> None:
        self._lists: asyncio.Queue[Sequence[Listed]] = asyncio.Queue()
        self.publish(*addresses)

    def publish(self, *addresses: str) -> None:
        """Yields these addresses as the new list."""
        self._lists.put_nowait([Listed(address) for address in addresses])

    async def lists(self) -> AsyncIterator[Sequence[Listed]]:
        while True:
            yield await self._lists.get()
