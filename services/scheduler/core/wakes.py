"""Which replicas are to decide a step, after something has happened that may concern them. Pure.

A replica at work decides again by itself: when a result is there, or when its pacer holds it back no longer. Only those
have to be woken that rest: their last decision was to run nobody, though another step could have been sent. Few of them
are all woken, and those decide whose a request is. Of many only the one is that placement names: with a thousand idle
replicas, a request is to cost no more than with ten.
"""

from collections.abc import Collection
from operator import attrgetter

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep

_FEW = 8
_by_id = attrgetter("replica_id")


class Wakes:
    """Knows who rests, and says whom to wake."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._resting: dict[Replica, None] = {}

    def after_arrival(self, request: Request) -> Collection[Replica]:
        """A request waits that did not before."""
        resting = self._resting
        if len(resting) <= _FEW:
            return list(resting)
        choice = self._scheduler.placement.choice(request)
        if choice is None:
            return list(resting)  # one of them may make room
        return [choice] if choice in resting else []

    def after_decision(self, replica: Replica, step: ScheduledStep | None) -> Collection[Replica]:
        """A replica has decided, and may have left requests to others."""
        if step is None and replica.can_schedule:
            self._resting[replica] = None
        else:
            self._resting.pop(replica, None)
        # Where somebody was admitted, another one may be the place for who is first now.
        return self._wanted(self._for_first() if step is not None and step.admitted else ())

    def after_result(self, replica: Replica) -> Collection[Replica]:
        """Somebody less may run there; the replica itself comes first."""
        return [replica, *(other for other in self._for_first() if other is not replica)]

    def after_end(self) -> Collection[Replica]:
        """Requests have ended before their time: there is a row for another one, of which the executor is to hear."""
        return self._wanted(self._for_first())

    def forget(self, replica: Replica) -> None:
        """It is gone."""
        self._resting.pop(replica, None)

    def _wanted(self, others: Collection[Replica]) -> Collection[Replica]:
        wanted = self._scheduler.placement.take_wanted()
        return sorted(wanted.union(others), key=_by_id) if wanted else others

    def _for_first(self) -> Collection[Replica]:
        if not self._resting or not self._scheduler.num_waiting:
            return ()
        first = next((request for request in self._scheduler.waiting if request.blocks.awaited is None), None)
        return () if first is None else self.after_arrival(first)
