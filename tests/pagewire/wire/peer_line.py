"""Counting services that a link divides requests among."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pagewire.wire.streams import Affinity
from tests.pagewire.wire.counting import CountedRequest, CountingLink, CountingService, linked, serving
from tests.pagewire.wire.discovery.fake_discovery import FakeDiscovery
from tests.pagewire.wire.test_streams import eventually


class Line:
    """Services by number, each of which can be ended and started."""

    def __init__(self, directory: Path, *services: CountingService) -> None:
        self.directory, self.services = directory, list(services)
        self.discovery = FakeDiscovery(*map(self.address, range(len(services))))
        self._running: dict[int, AsyncExitStack] = {}

    def address(self, number: int) -> str:
        return f"unix:{self.directory}/s{number}.sock"

    async def start(self, number: int) -> None:
        self._running[number] = stack = AsyncExitStack()
        await stack.enter_async_context(serving(self.directory, self.services[number], f"s{number}"))

    async def kill(self, number: int) -> None:
        await self._running.pop(number).aclose()

    @property
    def num_live(self) -> list[int]:
        return [service.num_live for service in self.services]

    @asynccontextmanager
    async def running(self, *numbers: int, recovery_timeout: float = 20.0) -> AsyncIterator[CountingLink]:
        """Starts the services with these numbers, or all, and links to them."""
        for number in numbers or range(len(self.services)):
            await self.start(number)
        try:
            async with linked(self.directory, recovery_timeout, self.discovery) as link:
                yield link
        finally:
            for number in list(self._running):
                await self.kill(number)


def submit(link: CountingLink, count: int, length: int = 5, affinity: Affinity | None = None) -> list[CountedRequest]:
    requests = [CountedRequest(1000 * number, length) for number in range(count)]
    for request in requests:
        request.affinity = affinity
        link.submit(request)
    return requests


def assert_complete(requests: Sequence[CountedRequest], *services: CountingService) -> None:
    for request in requests:
        assert request.error is None and request.received == request.expected
    for service in services:
        assert not service.errors


def paused(count: int) -> list[CountingService]:
    services = [CountingService() for _ in range(count)]
    for service in services:
        service.running.clear()
    return services


async def up(link: CountingLink, count: int) -> None:
    await eventually(lambda: sum(peer.is_up for peer in link.peers) == count)
