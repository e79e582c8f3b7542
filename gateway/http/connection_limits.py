"""Limits on the number of HTTP connections of a gateway process, and on their time."""

from dataclasses import dataclass

from pagewire.process.process import open_descriptors, raise_descriptor_limit

# 16,000 idle connections take about 250 MB, with TLS about 800 MB.
MAX_CONNECTIONS = 16_384
BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits in seconds, bytes and connections."""

    idle_s: float = 75.0  # longer than load balancers keep idle connections, so that none closes as a request arrives
    # From the first byte of a request to the end of its headers; for a TLS handshake, from the start of the connection.
    head_s: float = 15.0
    # From the headers to the end of the body; each KiB of it adds a second.
    body_s: float = 30.0
    body_bytes_per_s: int = 1024
    unread_s: float = 60.0  # to read 48 KiB of an answer that wait in addition to the system's buffers
    new_s: float = 1.0  # a younger connection is not closed to make room
    head_bytes: int = 64 * 1024
    pipelined: int = 64  # requests that are sent before the previous answer
    connections: int = MAX_CONNECTIONS
    reserve: int = BACKLOG  # more connections, for probes and for refusals
    log_every_s: float = 60.0

    @classmethod
    def of_this_process(cls) -> "Limits":
        """Returns limits for this process, after raising its soft limit of descriptors.

        Three quarters are for connections; files, the store, the tokenizer link and the reserve share the rest.
        """
        free = max(8, raise_descriptor_limit() - open_descriptors())
        return cls(connections=min(MAX_CONNECTIONS, free * 3 // 4), reserve=min(BACKLOG, free // 8))
