"""What people give as the address of a stack, and why nothing answers there."""

from urllib.parse import urlsplit

from pagewire.stack.running import running_stacks
from pagewire.wire.health import http_answers
from pagewire.wire.tls import GRPC_WITH_TLS, speaks_tls, why_unavailable

_LOCAL = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1", "0.0.0.0": "127.0.0.1"}


def grpc_address(given: str) -> str:
    """As `Client` takes it. A URL of http(s) is one of REST: of a stack on this machine the gRPC port is known."""
    if given.startswith(("unix:", GRPC_WITH_TLS)):
        return given
    scheme, netloc = urlsplit(given)[:2] if given.startswith(("http://", "https://")) else ("", given)
    for stack in running_stacks():
        # A stack with TLS is for this user's commands at its socket, which needs no certificates.
        if _same(netloc, urlsplit(stack.rest).netloc) or (stack.local and _same(netloc, urlsplit(stack.grpc).netloc)):
            return stack.reachable
    return f"{GRPC_WITH_TLS}{netloc}" if scheme == "https" else netloc


def unanswered(address: str, message: str) -> str:
    """What to tell a person where a call to `address` ended with UNAVAILABLE and this message."""
    host, _, port = address.removeprefix(GRPC_WITH_TLS).rpartition(":")
    scheme = "https" if address.startswith(GRPC_WITH_TLS) else "http"
    if not address.startswith("unix:") and http_answers(f"{scheme}://{host}:{port}/ping"):
        return (
            f"{address} speaks HTTP: it is the REST port. Give the gRPC port instead: 8001, or what --grpc-port of the"
            " server says"
        )
    if scheme == "https" and (cause := why_unavailable(f"{host}:{port}", message)):
        return f"{address}: {cause}"
    if scheme == "http" and port.isdecimal() and speaks_tls(host.strip("[]"), int(port)):
        return f"{address} speaks TLS: give it as {GRPC_WITH_TLS}{address}, with --ssl-ca-certs for a CA of your own"
    return f"nothing answers at {address} ({message}): start a stack with `pagewire serve`, or name another address"


def _same(one: str, other: str) -> bool:
    """Whether these name the same port of this machine."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    return port == other_port and _LOCAL.get(host, host) == _LOCAL.get(other_host, other_host)
