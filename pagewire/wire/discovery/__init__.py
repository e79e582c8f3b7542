"""Discovery of the services behind a service: fixed addresses, a file, DNS or Kubernetes.

A `Discovery` yields the whole list, and again whenever it changes. A new service gets requests at once, and a service
that has left the list gets no new ones.
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
        raise StartupError(f"{flag} {','.join(addresses)}: use one file, with one address a line")
    return AddressesInFile(Path(addresses[0]))


def _kubernetes(flag: str, addresses: tuple[str, ...]) -> Discovery:
    # Deferred: only Kubernetes needs an HTTP client.
    from pagewire.wire.discovery.kubernetes import Kubernetes
    from pagewire.wire.discovery.kubernetes_api import Api

    return Kubernetes(flag, addresses, Api.of_pod(flag))


_MAKERS: dict[str, _Make] = {"static": _static, "dns": Dns, "kubernetes": _kubernetes, "file": _file}
KINDS = tuple(_MAKERS)


def discover(kind: str, flag: str, value: str) -> Discovery:
    """Returns a discovery of one of KINDS. Raises StartupError.

    flag, value: those of the addresses, separated by commas.
    """
    return _MAKERS[kind](flag, split_addresses(flag, value))
