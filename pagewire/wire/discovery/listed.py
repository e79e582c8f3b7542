"""A list of services, and one that stays as it is."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from pagewire.errors import StartupError


class Listed(NamedTuple):
    """One service that is there, or is about to be."""

    address: str  # "unix:/path" or "host:port"
    host: str = ""  # whose certificate it shows, where that is not the address's


class Discovery(Protocol):
    def lists(self) -> AsyncIterator[Sequence[Listed]]:
        """The list, and again whenever it is another one; it may end if it never will be. What cannot be found out for
        a while is as it was: the list is only what somebody has said."""


class Static:
    """As it was given."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._listed = [Listed(address) for address in addresses]

    async def lists(self) -> AsyncIterator[Sequence[Listed]]:
        yield self._listed


async def told_of(
    changed: asyncio.Event, current: Callable[[], list[Listed] | None], sources: Sequence[Coroutine[Any, Any, None]]
) -> AsyncIterator[list[Listed]]:
    """The current list whenever it is another one, while the sources run, which set `changed`.

    current: None as long as nothing is known. What a source raises is raised.
    """
    tasks = [asyncio.create_task(source) for source in sources]
    for task in tasks:
        task.add_done_callback(lambda _: changed.set())
    told: list[Listed] | None = None
    try:
        while True:
            if (listed := current()) is not None and listed != told:
                yield listed
                told = listed
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
    """Raises StartupError unless each is there and there once."""
    addresses = tuple(address.strip() for address in value.split(","))
    if "" in addresses or len(set(addresses)) < len(addresses):
        raise StartupError(
            f"{flag} {value!r}: an address is empty or stands there twice; name each once, separated by commas"
        )
    return addresses


def with_port(host: str, port: int) -> str:
    """host: a name or an IP address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
