"""Outputs of requests that wait to be sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# This many outputs of a request wait unmerged: merging many at once costs less.
MAX_PARTS = 64


@dataclass(slots=True)
class _Newer(Generic[V]):
    """The outputs of a request that wait behind the oldest one."""

    outputs: list[V] = field(default_factory=list)
    size: int = 0  # of all outputs, merged or not


class Outbox(Generic[K, V]):
    """Outputs by request, merged until they are taken. Producers and the one consumer are on one event loop."""

    def __init__(self, merge: Callable[[Sequence[V]], V], size: Callable[[V], int]) -> None:
        """merge: merges several outputs of a request, the oldest first; it may change them. size: of an output, in
        tokens and log probabilities."""
        self._merge = merge
        self._size = size
        self._oldest: dict[K, V] = {}
        self._newer: dict[K, _Newer[V]] = {}
        # The size of all outputs since the last take() that found an older one unread.
        self.num_unread = 0
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, key: K, output: V) -> int:
        """Adds an output, and returns the size of the outputs that wait behind the oldest one of this key."""
        self._wake.set()
        if key not in self._oldest:
            self._oldest[key] = output
            return 0
        newer = self._newer.get(key)
        if newer is None:
            newer = self._newer[key] = _Newer()
        size = self._size(output)
        newer.size += size
        self.num_unread += size
        newer.outputs.append(output)
        if len(newer.outputs) == MAX_PARTS:
            self._oldest[key] = self._merge([self._oldest[key], *newer.outputs])
            newer.outputs.clear()
        return newer.size

    def discard(self, key: K) -> None:
        """Drops the outputs of a key."""
        self._oldest.pop(key, None)
        self._newer.pop(key, None)

    def close(self) -> None:
        """Ends the outbox: take() returns the remaining outputs, then nothing."""
        self._closed = True
        self._wake.set()

    async def take(self) -> dict[K, V]:
        """Waits for outputs and returns all of them, one for each key, the oldest key first; empty only when closed."""
        while not self._oldest and not self._closed:
            self._wake.clear()
            await self._wake.wait()
        taken, self._oldest = self._oldest, {}
        if self._newer:
            for key, newer in self._newer.items():
                if newer.outputs:
                    taken[key] = self._merge([taken[key], *newer.outputs])
            self._newer = {}
            self.num_unread = 0
        return taken

    async def __aiter__(self) -> AsyncIterator[dict[K, V]]:
        while taken := await self.take():
            yield taken
