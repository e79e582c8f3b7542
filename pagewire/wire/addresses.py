"""Hosts and ports, as addresses on which servers listen and at which clients find them."""

import ipaddress
import re


def endpoint(host: str, port: int) -> str:
    """Returns "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Returns the host at which clients on this machine find a server that listens on `host`."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def without_directories(text: str) -> str:
    """Returns a text with the addresses of Unix sockets as clients may see them: without the machine's directories."""
    return re.sub(r"unix:\S*/", "unix:", text)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or "" for every address
        return False
