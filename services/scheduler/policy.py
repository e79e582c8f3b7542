"""Who goes first: the order of waiting requests and, from the other end, of preemption."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from pagewire.services.scheduler.kv_cache import KVCacheManager
from pagewire.services.scheduler.request import Request

# request, arrival number -> its place; unique, smaller first.
Policy = Callable[[Request, int], tuple[int, int]]

by_order = attrgetter("order")


def fcfs(request: Request, arrival: int) -> tuple[int, int]:
    """First come, first served."""
    return (0, arrival)


def priority(request: Request, arrival: int) -> tuple[int, int]:
    """Lower priority values first, first come among equals."""
    return (request.sampling_params.priority, arrival)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def has_priority(waiting: Request, running: Request) -> bool:
    """Whether the one may take what the other holds; an earlier arrival alone is no reason."""
    return waiting.order[0] < running.order[0]


def num_victims(request: Request, running: Sequence[Request], num_open_rows: int, kv: KVCacheManager) -> int:
    """How many of the last of `running` have to be preempted to let a waiting request of higher priority in; 0 if
    nobody has to, or if all that may would not suffice."""
    num_missing_rows = 1 - num_open_rows
    missing = kv.num_missing_blocks(request, kv.get_computed_blocks(request), keep_free=True)  # by group
    for count, victim in enumerate(reversed(running)):
        if num_missing_rows <= 0 and max(missing, default=0) <= 0:
            return count
        if not has_priority(request, victim):
            return 0
        num_missing_rows -= 1
        missing = [lack - freed for lack, freed in zip(missing, kv.num_exclusive_blocks(victim), strict=True)]
    return len(running) if num_missing_rows <= 0 and max(missing, default=0) <= 0 else 0


class WaitingQueue:
    """Requests in the policy's order. A preempted request returns to its place, which under fcfs is the front."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=by_order)

    def __getitem__(self, place: int) -> Request:
        return self._requests[place]

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self, place: int = 0) -> Request:
        return self._requests.pop(place)

    def remove(self, request: Request) -> None:
        """Takes a request out that is known to wait here."""
        del self._requests[bisect_left(self._requests, request.order, key=by_order)]
