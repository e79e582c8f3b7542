"""Requests that offer to go on in another protocol, as HTTP/2 in plain text or WebSocket.

Java's HttpClient does with every first request, its body included. The offer is not taken, which RFC 9110, 7.8 allows;
but the parser takes all that follows such a head for the other protocol. So it is read again without the offer.
"""

from collections.abc import Iterable

_OFFER = frozenset({b"upgrade", b"connection", b"http2-settings"})


def head_without_offer(method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """What the parser has read, as it would have come without the offer."""
    kept = b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers if name not in _OFFER)
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), kept)
