"""Addresses of stacks as users give them, and the cause if nothing answers."""

from urllib.parse import urlsplit

from pagewire.stack.running import RunningStack, running_stacks
from pagewire.wire.health import http_answers
from pagewire.wire.tls import GRPC_WITH_TLS, speaks_tls, why_unavailable

_LOCAL = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1", "0.0.0.0": "127.0.0.1"}


def grpc_address(given: str) -> str:
    """Returns an address for `Client`. For the REST URL of a stack on this machine, it is the stack's gRPC address."""
    if given.startswith(("unix:", GRPC_WITH_TLS)):
        return given
    scheme, netloc = _split(given)
    stack = stack_at(given)
    # Commands of the same user reach a stack with TLS at its socket, which needs no certificates.
    if stack is not None and (stack.local or _same(netloc, _split(stack.rest)[1])):
        return stack.reachable
    return f"{GRPC_WITH_TLS}{netloc}" if scheme == "https" else netloc


def stack_at(given: str) -> RunningStack | None:
    """Returns the stack on this machine with this REST URL or gRPC address."""
    _, netloc = _split(given)
    for stack in running_stacks():
        if any(_same(netloc, _split(own)[1]) for own in (stack.rest, stack.grpc)):
            return stack
    return None


def unanswered(address: str, message: str) -> str:
    """Returns the cause and the remedy after a call to `address` ended with UNAVAILABLE and this message."""
    host, _, port = address.removeprefix(GRPC_WITH_TLS).rpartition(":")
    scheme = "https" if address.startswith(GRPC_WITH_TLS) else "http"
    if not address.startswith("unix:") and http_answers(f"{scheme}://{host}:{port}/ping"):
        return (
            f"{address} answers with HTTP: it is the REST port; use the gRPC port instead, 8001 or the --grpc-port of "
            "the server"
        )
    if scheme == "https" and (cause := why_unavailable(f"{host}:{port}", message)):
        return f"{address}: {cause}"
    if scheme == "http" and port.isdecimal() and speaks_tls(host.strip("[]"), int(port)):
        return f"{address} answers with TLS: use {GRPC_WITH_TLS}{address}, with --ssl-ca-certs for a private CA"
    return f"nothing answers at {address} ({message}): start a stack with `pagewire serve`, or use another address"


def _split(address: str) -> tuple[str, str]:
    """Returns the scheme, or "", and the host with the port."""
    return urlsplit(address)[:2] if "://" in address else ("", address)


def _same(one: str, other: str) -> bool:
    """Returns whether two addresses are the same port of this machine."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    return port == other_port and _LOCAL.get(host, host) == _LOCAL.get(other_host, other_host)
