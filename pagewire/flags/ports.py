"""The ports of a stack: each is used once, and a port that the user did not set makes room for those that are set."""

import dataclasses
from collections.abc import Collection
from typing import Any

from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.flags.names import flag_name

# The ports with a default other than none, which make room in this order.
_MOVABLE = ("grpc_port", "port")
_OPERATORS = ("admin_port", "metrics_port")
_PORTS = ("port", "grpc_port", "scheduler_grpc_port", *_OPERATORS)
_HIGHEST = 65535
_EVERY, _LOOPBACK = "*", "127.0.0.1"


def settled(config: ServeConfig, given: Collection[str]) -> tuple[ServeConfig, list[str]]:
    """Returns the configuration in which unset ports avoid the others, and a line for each port that moved.

    given: the names of the fields that the user set.
    """
    lines: list[str] = []
    for name in _MOVABLE:
        port = getattr(config, name)
        if name in given or not port or (other := _clash(config, name)) is None:
            continue
        config = next(
            moved for free in range(port + 1, _HIGHEST) if _clash(moved := _with(config, name, free), name) is None
        )
        now = getattr(config, name)
        lines.append(f"{flag_name(other)} is {port}: {flag_name(name)} is not set, and becomes {now}")
    return config, lines


def _with(config: ServeConfig, name: str, port: int) -> ServeConfig:
    change: dict[str, Any] = {name: port}
    return dataclasses.replace(config, **change)


def check(config: ServeConfig) -> None:
    """Raises StartupError for a port that is given twice: while nothing listens yet, it looks free each time."""
    for name in _PORTS:
        if (other := _clash(config, name)) is not None:
            raise StartupError(
                f"{flag_name(name)} and {flag_name(other)} are both {getattr(config, name)}: give each its own port"
            )


def _clash(config: ServeConfig, name: str) -> str | None:
    """Returns another field with the same port, if both listen on the same address or one of them on all; 0 is chosen
    when it starts."""
    port, host = getattr(config, name), _host(config, name)
    for other in _PORTS:
        hosts = {host, _host(config, other)}
        if other != name and port and getattr(config, other) == port and (len(hosts) == 1 or _EVERY in hosts):
            return other
    return None


def _host(config: ServeConfig, name: str) -> str:
    host = config.admin_host if name in _OPERATORS else config.host
    return _EVERY if host in ("", "::", "0.0.0.0") else _LOOPBACK if host == "localhost" else host
