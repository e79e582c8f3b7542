"""Names that are resolved periodically; each address of a name is a service.

DNS cannot express that there is no service at the moment: an answer without addresses looks like that of a server that
has lost its data. So a name that does not resolve keeps its last addresses; removed services do not answer.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from pagewire.errors import StartupError
from pagewire.wire.discovery.listed import Listed, changes, is_ip, with_port

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0

# Returns the IP addresses of a host. Raises OSError.
Resolve = Callable[[str], Awaitable[Sequence[str]]]


async def resolve(host: str) -> Sequence[str]:
    """Resolves a host as the system does: /etc/hosts, search domains, IPv4 and IPv6. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


class Dns:
    """The services at all addresses of names. Addresses that are not names stay as they are."""

    def __init__(
        self, flag: str, addresses: Sequence[str], resolve: Resolve = resolve, interval: float = INTERVAL_S
    ) -> None:
        """interval: seconds from one answer to the next query. Raises StartupError."""
        self._resolve = resolve
        self._interval = interval
        self._names = {address: _split(flag, address) for address in addresses if not _is_fixed(address)}
        # By the given address; None: not resolved yet.
        self._known: dict[str, list[Listed] | None] = {
            address: None if address in self._names else [Listed(address)] for address in addresses
        }
        self._changed = asyncio.Event()
        self._logged_twice: set[str] = set()

    async def lists(self) -> AsyncIterator[Sequence[Listed]]:
        async for listed in changes(self._changed, self._list, [self._ask(name) for name in self._names]):
            yield listed

    def _list(self) -> list[Listed] | None:
        if all(known is None for known in self._known.values()):
            return None
        found = [one for known in self._known.values() for one in known or ()]
        by_address: dict[str, Listed] = {}
        for one in found:
            if by_address.setdefault(one.address, one) is not one and one.address not in self._logged_twice:
                self._logged_twice.add(one.address)
                logger.info("%s has two names; it counts once", one.address)
        return list(by_address.values())

    async def _ask(self, address: str) -> None:
        """Resolves one name again and again, so that a slow name does not delay others."""
        host, port = self._names[address]
        failure = ""
        while True:
            try:
                found = sorted({with_port(one, port) for one in await self._resolve(host)})
                if not found:
                    raise OSError("it has no addresses")
            except (OSError, UnicodeError) as error:  # UnicodeError: for malformed names
                if not failure:
                    logger.warning(
                        "%s does not resolve (%s): %s", host, error,
                        "its last addresses stay in use" if self._known[address] else "it is not used until it does",
                    )  # fmt: skip
                failure = str(error)
            else:
                if failure:
                    logger.info("%s resolves again", host)
                failure = ""
                if (listed := [Listed(one, host) for one in found]) != self._known[address]:
                    self._known[address] = listed
                    self._changed.set()
            await asyncio.sleep(self._interval)


def _is_fixed(address: str) -> bool:
    return address.startswith(("unix:", "ipv4:", "ipv6:")) or is_ip(address.rpartition(":")[0])


def _split(flag: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or ":" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StartupError(f"{flag}: {address!r} is not a name with a port; write HOST:PORT")
    return host, int(port)
