"""The list of services of a discovery, and the fixed list."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from pagewire.errors import StartupError


class Listed(NamedTuple):
    """One listed service."""

    address: str  # "unix:/path" or "host:port"
    host: str = ""  # the name in its certificate, if it is not that of the address


class Discovery(Protocol):
    """A source of the services behind a service."""

    def lists(self) -> AsyncIterator[Sequence[Listed]]:
        """Yields the list, and again whenever it changes; ends if it never can.

        While a source does not answer, its last list counts.
        """


class Static:
    """A fixed list of addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._listed = [Listed(address) for address in addresses]

    async def lists(self) -> AsyncIterator[Sequence[Listed]]:
        yield self._listed


async def changes(
    changed: asyncio.Event, current: Callable[[], list[Listed] | None], sources: Sequence[Coroutine[Any, Any, None]]
) -> AsyncIterator[list[Listed]]:
    """Yields the current list whenever it differs, while the sources run, which set `changed`.

    current: returns None while nothing is known. Raises the errors of sources.
    """
    tasks = [asyncio.create_task(source) for source in sources]
    for task in tasks:
        task.add_done_callback(lambda _: changed.set())
    last: list[Listed] | None = None
    try:
        while True:
            if (listed := current()) is not None and listed != last:
                yield listed
                last = listed
            await changed.wait()
            changed.clear()
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def split_addresses(flag: str, value: str) -> tuple[str, ...]:
    """Splits addresses at commas. Raises StartupError for an empty or repeated address."""
    addresses = tuple(address.strip() for address in value.split(","))
    if "" in addresses or len(set(addresses)) < len(addresses):
        raise StartupError(
            f"{flag} {value!r}: an address is empty or occurs twice; list each once, separated by commas"
        )
    return addresses


def with_port(host: str, port: int) -> str:
    """Returns "host:port" for a name or an IP address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
