"""The waiting requests, and the order of their turns.

Each tenant has lanes for short and for long prompts, with and without output, all in the policy's order. The lanes of
the least served tenant go first; among these, and with a single tenant, the policy decides. So requests follow the
policy's order until long ones have to wait for each other, or a replica takes only those with or without output.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from heapq import merge

from pagewire.services.scheduler.core.policy import by_order, has_turn_before
from pagewire.services.scheduler.core.seams import Shares
from pagewire.services.scheduler.values.account import Account
from pagewire.services.scheduler.values.request import Request

Lane = tuple[Account, bool, bool]  # the tenant, whether the prompts are long, and whether there is output


def _lane_of(request: Request) -> Lane:
    return request.account, request.is_long, request.num_output_tokens > 0


class WaitingQueue:
    """Waiting requests. A preempted one returns to its place, which under fcfs is the front of its lane."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.lanes: dict[Lane, list[Request]] = {}  # without empty lanes
        self.num_tokens: dict[Lane, int] = {}  # of the requests in each lane
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def num_short(self) -> int:
        """The number of waiting requests with short prompts."""
        return sum(len(lane) for (_, is_long, _), lane in self.lanes.items() if not is_long)

    def __iter__(self) -> Iterator[Request]:
        """Yields all of them in the policy's order."""
        return merge(*self.lanes.values(), key=by_order)

    def push(self, request: Request) -> None:
        lane = _lane_of(request)
        if lane not in self.lanes:
            self.lanes[lane], self.num_tokens[lane] = [], 0
        insort(self.lanes[lane], request, key=by_order)
        self.num_tokens[lane] += request.num_tokens
        self._size += 1
        self.shares.count(request.account, waiting=1)

    def remove(self, request: Request) -> None:
        """Removes a request that is known to wait here."""
        key = _lane_of(request)
        lane = self.lanes[key]
        del lane[bisect_left(lane, request.order, key=by_order)]
        self.num_tokens[key] -= request.num_tokens
        if not lane:
            del self.lanes[key], self.num_tokens[key]
        self._size -= 1
        self.shares.count(request.account, waiting=-1)


class Turns:
    """Goes through the waiting requests in the order of their turns, while some are taken out."""

    def __init__(
        self,
        queue: WaitingQueue,
        max_running_per_tenant: int | None = None,
        suits: Callable[[Request], bool] = lambda request: True,
        kinds: Collection[bool] = (False, True),
    ) -> None:
        """max_running_per_tenant: the number of running requests from which a tenant gets no turn. suits: returns
        whether a request may have a turn. kinds: True: requests with output have turns, False: those without."""
        self._queue = queue
        self._suits = suits
        self._max_running = max_running_per_tenant
        self._places = {lane: 0 for lane in queue.lanes if lane[2] in kinds}  # index of the next one with a turn

    def next(self) -> Request | None:
        """Returns the request that has the next turn."""
        is_contended = self._queue.shares.is_contended
        best: Request | None = None
        for key, place in self._places.items():
            if self._max_running is not None and key[0].num_running >= self._max_running:
                continue
            lane = self._queue.lanes.get(key, ())
            while place < len(lane) and not self._suits(lane[place]):
                place = self._places[key] = place + 1
            if place >= len(lane):
                continue
            if best is None or has_turn_before(lane[place], best, is_contended):
                best = lane[place]
        return best

    def pass_over(self, request: Request) -> None:
        """Gives the lane's turn to the request behind this one, which is not taken."""
        self._places[_lane_of(request)] += 1

    def close(self, request: Request) -> None:
        """Gives no more turns to the lane of a request that is not taken."""
        self._places.pop(_lane_of(request), None)
