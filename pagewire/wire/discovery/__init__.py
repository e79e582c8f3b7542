"""Where services find those behind them: the addresses as they are given, what a file, DNS or Kubernetes says.

A `Discovery` yields the whole list, again whenever it is another one. Who follows it uses a newcomer at once, and gives
one that has left the list nothing new.
"""

from collections.abc import Callable
from pathlib import Path

from pagewire.errors import StartupError
from pagewire.wire.discovery.dns import Dns
from pagewire.wire.discovery.file import AddressesInFile
from pagewire.wire.discovery.listed import Discovery, Listed, Static, split_addresses

__all__ = ["KINDS", "Discovery", "Listed", "Static", "discover"]

_Make = Callable[[str, tuple[str, ...]], Discovery]


def _static(flag: str, addresses: tuple[str, ...]) -> Discovery:
    return Static(addresses)


def _file(flag: str, addresses: tuple[str, ...]) -> Discovery:
    if len(addresses) > 1:
        raise StartupError(f"{flag} {','.join(addresses)}: name one file, which has one address a line")
    return AddressesInFile(Path(addresses[0]))


def _kubernetes(flag: str, addresses: tuple[str, ...]) -> Discovery:
    # Nobody else needs an HTTP client for it.
    from pagewire.wire.discovery.kubernetes import Kubernetes
    from pagewire.wire.discovery.kubernetes_api import Api

    return Kubernetes(flag, addresses, Api.of_pod(flag))


_MAKERS: dict[str, _Make] = {"static": _static, "dns": Dns, "kubernetes": _kubernetes, "file": _file}
KINDS = tuple(_MAKERS)


def discover(kind: str, flag: str, value: str) -> Discovery:
    """kind: one of KINDS. flag, value: what says where, comma separated. Raises StartupError."""
    return _MAKERS[kind](flag, split_addresses(flag, value))
