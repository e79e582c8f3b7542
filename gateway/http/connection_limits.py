"""How many HTTP connections a gateway process takes, and how long each may take over what."""

from dataclasses import dataclass

from pagewire.process.process import open_descriptors, raise_descriptor_limit

# What a process has room for; 16,000 idle connections take some 250 MB, with TLS some 800 MB.
MAX_CONNECTIONS = 16_384
BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds, bytes, and numbers of connections."""

    idle_s: float = 75.0  # longer than load balancers keep idle connections: who sends must not find it just closed
    # From the first byte of a request to the end of its headers; also for a TLS handshake, from the connection on.
    head_s: float = 15.0
    # From there to the end of its body; each KiB that has come gives it another second.
    body_s: float = 30.0
    body_bytes_per_s: int = 1024
    unread_s: float = 60.0  # for 48 KiB of its answer, once that much waits for a client beyond the system's buffers
    new_s: float = 1.0  # a head that is younger is not given up to make room
    head_bytes: int = 64 * 1024
    pipelined: int = 64  # requests that are sent before the answer of the one before them
    connections: int = MAX_CONNECTIONS
    reserve: int = BACKLOG  # more connections, for probes and for who is told that there is no room
    log_every_s: float = 60.0

    @classmethod
    def of_this_process(cls) -> "Limits":
        """Raises the soft limit of descriptors. Three quarters are for connections; files, the store, the line to the
        tokenizer and the reserve share the rest."""
        free = max(8, raise_descriptor_limit() - open_descriptors())
        return cls(connections=min(MAX_CONNECTIONS, free * 3 // 4), reserve=min(BACKLOG, free // 8))
