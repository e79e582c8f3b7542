"""Room for the bodies of requests in flight: each is bounded, and so is their sum."""

import os
from collections import Counter

from pagewire.gateway.core.errors import ApiError
from pagewire.process.cgroup import available_memory

# The bodies of requests in flight may take this part of the memory: parsed, converted, and kept to be sent again to
# another service, each takes several times as much.
_PART = 1 / 32
_LEAST_BYTES = 192 * 1024 * 1024
# Of all bodies, those of one client.
_OWN_PART = 3 / 4
# Bodies up to this size are always taken; the number of connections bounds their sum.
SMALL_BYTES = 64 * 1024


class BodyRoom:
    """Counts the bytes of bodies, in sum and by client. A client that takes all that it may leaves some to others."""

    def __init__(self, limit: int | None = None) -> None:
        """limit: bytes of all bodies; by default, a part of the memory of this process."""
        self.limit = max(_LEAST_BYTES, round(_PART * _memory())) if limit is None else limit
        self.own_limit = round(_OWN_PART * self.limit)
        self._taken = 0
        self._by_client: Counter[str] = Counter()

    def take(self, client: str, size: int, part: int) -> None:
        """Takes room for a body of `size` bytes so far, of which `part` bytes have none yet. Raises ApiError if there
        is too little."""
        own = self._by_client[client]
        if size > SMALL_BYTES and (own + part > self.own_limit or self._taken + part > self.limit):
            if own + part > self.own_limit:
                what = f"of your requests in flight have {own} of at most {self.own_limit} bytes"
            else:
                what = f"of all requests in flight have {self._taken} of at most {self.limit} bytes"
            raise ApiError(
                503,
                f"the bodies {what}, and this one of {size} bytes does not fit; try again when some have ended, or send"
                f" a body of at most {SMALL_BYTES} bytes",
                code="bodies_too_large",
            )
        self._taken += part
        self._by_client[client] += part

    def give_back(self, client: str, size: int) -> None:
        self._taken -= size
        self._by_client[client] -= size
        if not self._by_client[client]:
            del self._by_client[client]


class BodyPlace:
    """Holds the room of one body."""

    def __init__(self, room: BodyRoom, client: str) -> None:
        self._room = room
        self._client = client
        self._size = 0

    def grow(self, size: int) -> None:
        """Takes room for `size` bytes in all, unless it has as much. Raises ApiError if there is too little."""
        if size > self._size:
            self._room.take(self._client, size, size - self._size)
            self._size = size

    def close(self) -> None:
        self._room.give_back(self._client, self._size)
        self._size = 0


def _memory() -> int:
    """Returns the bytes that this process may have."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(installed, available_memory() or installed)
