"""Simulated time: what happens when."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """Events in the order of their times; those of the same time in the order in which they were announced."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_announced = 0

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        self._num_announced += 1
        heappush(self._events, (max(time, self.now), self._num_announced, call, args))

    def soon(self, call: Callable[..., None], *args: Any) -> None:
        """Now, behind what is announced for now."""
        self.at(self.now, call, *args)

    def run(self) -> None:
        """Runs until no event is left."""
        while self._events:
            self.now, _, call, args = heappop(self._events)
            call(*args)
