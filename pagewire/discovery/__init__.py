"""Where services find those behind them: the addresses as they are given, what DNS says, or what Kubernetes says.

A `Discovery` yields the whole list, again whenever it is another one. Who follows it uses a newcomer at once, and gives
one that has left the list nothing new.
"""

from collections.abc import Callable

from pagewire.discovery.listed import Discovery, Listed, Static, split_addresses

__all__ = ["KINDS", "Discovery", "Listed", "Static", "discover"]


def _static(flag: str, addresses: tuple[str, ...]) -> Discovery:
    return Static(addresses)


KINDS: dict[str, Callable[[str, tuple[str, ...]], Discovery]] = {"static": _static}


def discover(kind: str, flag: str, value: str) -> Discovery:
    """kind: one of KINDS. flag, value: what says where, comma separated. Raises StartupError."""
    return KINDS[kind](flag, split_addresses(flag, value))
