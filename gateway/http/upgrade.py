"""Requests that offer to switch to another protocol, as HTTP/2 in plain text or WebSocket.

Java's HttpClient sends the offer with every first request, even one with a body. The offer is ignored, as RFC 9110, 7.8
allows; but the parser takes everything after such a head for the other protocol. So it is parsed again without it.
"""

from collections.abc import Iterable

_OFFER = frozenset({b"upgrade", b"connection", b"http2-settings"})


def head_without_offer(method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the head that was parsed, without the offer."""
    kept = b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers if name not in _OFFER)
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), kept)
