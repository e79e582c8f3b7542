"""What is to be sent, by request."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Outbox(Generic[K, V]):
    """Outputs by request, merged until they are taken. One producer side, one consumer; all on one event loop."""

    def __init__(self, merge: Callable[[V, V], V], size: Callable[[V], int] = lambda value: 1) -> None:
        """merge(older, newer) returns what one message would have said for both; it may change `older`. size: what
        `num_merged` counts of an output."""
        self._merge = merge
        self._size = size
        # Of all outputs that came since something was taken and found older ones unread.
        self.num_merged = 0
        self._pending: dict[K, V] = {}
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, key: K, value: V) -> V:
        """Returns what is to be sent next for this key; lets the producer bound it."""
        older = self._pending.get(key)
        if older is None:
            pending = value
        else:
            self.num_merged += self._size(value)
            pending = self._merge(older, value)
        self._pending[key] = pending
        self._wake.set()
        return pending

    def discard(self, key: K) -> None:
        self._pending.pop(key, None)

    def close(self) -> None:
        """Nothing more comes: take() returns what is left, then ends."""
        self._closed = True
        self._wake.set()

    async def take(self) -> dict[K, V]:
        """Waits until there is something and returns all of it, oldest request first; empty only when closed."""
        while not self._pending and not self._closed:
            self._wake.clear()
            await self._wake.wait()
        taken, self._pending = self._pending, {}
        self.num_merged = 0
        return taken

    async def __aiter__(self) -> AsyncIterator[dict[K, V]]:
        while taken := await self.take():
            yield taken
