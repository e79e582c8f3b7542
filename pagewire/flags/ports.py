"""The ports of a stack: each is used once, and a port that the user did not set makes room for those that are set."""

import dataclasses
import errno
import socket
from collections.abc import Collection, Iterator
from typing import Any

from pagewire.config import GatewayConfig, ServeConfig
from pagewire.errors import StartupError
from pagewire.flags.names import flag_name
from pagewire.wire.addresses import endpoint

# The ports with a default other than none, which make room in this order.
_MOVABLE = ("grpc_port", "port")
_OPERATORS = ("admin_port", "metrics_port")
_PORTS = ("port", "grpc_port", "scheduler_grpc_port", *_OPERATORS)
_HIGHEST = 65535
_EVERY, _LOOPBACK = "*", "127.0.0.1"


def settled(config: ServeConfig, given: Collection[str]) -> tuple[ServeConfig, list[str]]:
    """Returns the configuration in which unset ports avoid the others, and a line for each port that moved. The gRPC
    port also avoids other processes; the REST port does not, as clients expect it where it is by default.

    given: the names of the fields that the user set.
    """
    lines: list[str] = []
    for name in _MOVABLE:
        port = getattr(config, name)
        if name in given or not port or not (reason := _obstacle(config, name)):
            continue
        config = next(
            moved for free in range(port + 1, _HIGHEST) if not _obstacle(moved := _with(config, name, free), name)
        )
        lines.append(f"{reason}: {flag_name(name)} is not set, and becomes {getattr(config, name)}")
    return config, lines


def _obstacle(config: ServeConfig, name: str) -> str:
    """Returns why a service cannot listen on this port; "" if it can, as far as this concerns the port."""
    port = getattr(config, name)
    if (other := _clash(config, name)) is not None:
        return f"{flag_name(other)} is {port}"
    return f"port {port} is in use" if name == "grpc_port" and _is_held(config.host, port) else ""


def _with(config: ServeConfig, name: str, port: int) -> ServeConfig:
    change: dict[str, Any] = {name: port}
    return dataclasses.replace(config, **change)


def check(config: GatewayConfig) -> None:
    """Raises StartupError for a port that is given twice (while nothing listens yet, it looks free each time), and for
    an address that is never free: the host is not this machine's, or the port is reserved. Whether another process
    uses it is seen at the start."""
    for name in _PORTS:
        if (other := _clash(config, name)) is not None:
            raise StartupError(
                f"{flag_name(name)} and {flag_name(other)} are both {getattr(config, name)}: give each its own port"
            )
    for name, host, port in _addresses(config):
        try:
            _bound(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _refusal(host, port, name, error) from error


def available_ports(config: GatewayConfig) -> dict[str, Any]:
    """Returns the ports that are set by field; for 0, a free one. Raises StartupError if one is in use."""
    return {name: available_port(host, port, name) for name, host, port in _addresses(config)}


def available_port(host: str, port: int = 0, name: str = "port") -> int:
    """Returns the port, or a free one for 0. Raises StartupError if it is in use or the host does not belong to this
    machine.

    name: of the field.
    """
    try:
        return _bound(host, port)
    except OSError as error:
        raise _refusal(host, port, name, error) from error


def _addresses(config: GatewayConfig) -> Iterator[tuple[str, str, int]]:
    """Yields field, host and port of each port that is set."""
    for name in _PORTS:
        if (port := getattr(config, name, None)) is not None:
            yield name, config.admin_host if name in _OPERATORS else config.host, port


def _bound(host: str, port: int) -> int:
    """Binds a port for a moment, and returns it. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return int(sock.getsockname()[1])


def _is_held(host: str, port: int) -> bool:
    try:
        _bound(host, port)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _refusal(host: str, port: int, name: str, error: OSError) -> StartupError:
    flag, of_host = flag_name(name), "--admin-host" if name in _OPERATORS else "--host"
    remedy = f"choose another with {flag} or {of_host}"
    if error.errno == errno.EADDRINUSE:
        remedy = f"stop the process that uses it, or {remedy}"
    return StartupError(f"{flag}: cannot listen on {endpoint(host, port)} ({error.strerror or error}): {remedy}")


def _clash(config: GatewayConfig, name: str) -> str | None:
    """Returns another field with the same port, if both listen on the same address or one of them on all; 0 is chosen
    when it starts."""
    port, host = getattr(config, name, None), _host(config, name)
    for other in _PORTS:
        hosts = {host, _host(config, other)}
        if other != name and port and getattr(config, other, None) == port and (len(hosts) == 1 or _EVERY in hosts):
            return other
    return None


def _host(config: GatewayConfig, name: str) -> str:
    host = config.admin_host if name in _OPERATORS else config.host
    return _EVERY if host in ("", "::", "0.0.0.0") else _LOOPBACK if host == "localhost" else host
