"""A list of services, and one that stays as it is."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

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


def split_addresses(flag: str, value: str) -> tuple[str, ...]:
    """Raises StartupError unless each is there and there once."""
    addresses = tuple(address.strip() for address in value.split(","))
    if "" in addresses or len(set(addresses)) < len(addresses):
        raise StartupError(
            f"{flag} {value!r}: an address is empty or stands there twice; name each once, separated by commas"
        )
    return addresses
