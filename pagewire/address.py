"""What people give as the address of a stack, and why nothing answers there."""

from urllib.parse import urlsplit

from pagewire.errors import StartupError
from pagewire.health import http_answers
from pagewire.running import running_stacks

_LOCAL = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1", "0.0.0.0": "127.0.0.1"}


def grpc_address(given: str) -> str:
    """As gRPC takes it. A URL is one of REST: of a stack on this machine the gRPC port is known.

    Raises StartupError for https.
    """
    if given.startswith("https://"):
        raise StartupError(f"{given}: gRPC is served without TLS; give host:port of the gRPC port")
    if "://" not in given and given.startswith("unix:"):
        return given
    netloc = urlsplit(given).netloc if given.startswith("http://") else given
    for stack in running_stacks():
        if _same(netloc, urlsplit(stack.rest).netloc):
            return stack.grpc
    return netloc


def unanswered(address: str, message: str) -> str:
    """What to tell a person where a call to `address` ended with UNAVAILABLE and this message."""
    if not address.startswith("unix:") and http_answers(f"http://{address}/ping"):
        return (
            f"{address} speaks HTTP: it is the REST port. Give the gRPC port instead: 8001, or what --grpc-port of the"
            " server says"
        )
    return f"nothing answers at {address} ({message}): start a stack with `pagewire serve`, or name another address"


def _same(one: str, other: str) -> bool:
    """Whether these name the same port of this machine."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    return port == other_port and _LOCAL.get(host, host) == _LOCAL.get(other_host, other_host)
