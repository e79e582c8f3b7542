"""Where services find those behind them: the addresses as they are given, what a file, DNS or Kubernetes says.

A `Discovery` yields the whole list, again whenever it is another one. Who follows it uses a newcomer at once, and gives
one that has left the list nothing new.
"""

from collections.abc import Callable
from pathlib import Path

from pagewire.discovery.file import AddressesInFile
from pagewire.discovery.listed import Discovery, Listed, Static, split_addresses
from pagewire.errors import StartupError

__all__ = ["KINDS", "AddressesInFile", "Discovery", "Listed", "Static", "discover"]


def _static(flag: str, addresses: tuple[str, ...]) -> Discovery:
    return Static(addresses)


def _file(flag: str, addresses: tuple[str, ...]) -> Discovery:
    if len(addresses) > 1:
        raise StartupError(f"{flag} {','.join(addresses)}: name one file, which has one address a line")
    return AddressesInFile(Path(addresses[0]))


KINDS: dict[str, Callable[[str, tuple[str, ...]], Discovery]] = {"static": _static, "file": _file}


def discover(kind: str, flag: str, value: str) -> Discovery:
    """kind: one of KINDS. flag, value: what says where, comma separated. Raises StartupError."""
    return KINDS[kind](flag, split_addresses(flag, value))
