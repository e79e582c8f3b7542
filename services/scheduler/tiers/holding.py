"""Blocks that are loaded for a request before it waits for a replica, and kept until it runs there."""

from collections.abc import Callable

from pagewire.services.scheduler.tiers.load import Load
from pagewire.services.scheduler.values.request import Request

# Begins a load of as many of a request's first blocks; None: there is nothing to load, or no room for the request.
Begin = Callable[[Request, int], Load | None]


class Holding:
    """The early loads of one request on one replica. Their blocks are held, so that nothing evicts them, until the
    request runs there or has ended, or until `release`."""

    def __init__(self, request: Request, begin: Begin) -> None:
        self.request = request
        self.is_over = False
        self.loads: list[Load] = []
        self._begin = begin

    def extend(self, num_blocks: int) -> bool:
        """Begins to load the request's first `num_blocks` blocks, as far as they are neither here nor on their way.
        Returns whether a load began: not if there is no room for the request."""
        load = None if self.is_over else self._begin(self.request, num_blocks)
        if load is None:
            return False
        self.loads.append(load)
        load.is_held = True
        return True

    def release(self) -> None:
        """Releases the blocks; those of loads under way when they end."""
        self.is_over = True
        loads, self.loads = self.loads, []
        for load in loads:
            load.is_held = False
            if load.is_over:
                load.release()
