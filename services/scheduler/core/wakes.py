"""Chooses the replicas that decide a step after an event. Pure.

A busy replica decides again without a wake-up: when a result arrives, or when its pacer no longer holds it back. Only
resting replicas have to be woken: those that decided last that nothing runs, although another step could have been
sent. If few rest, all are woken, and their decisions show which one takes a request. If many rest, only the one that
placement names is woken, so a request costs no more with a thousand idle replicas than with ten.
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
    """Knows the resting replicas, and which of them to wake."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._resting: dict[Replica, None] = {}

    def after_arrival(self, request: Request) -> Collection[Replica]:
        """Returns the replicas to wake for a request that waits now."""
        resting = self._resting
        if len(resting) <= _FEW:
            return list(resting)
        choice = self._scheduler.placement.choice(request)
        if choice is None:
            return list(resting)  # one of them may make room
        return [choice] if choice in resting else []

    def after_decision(self, replica: Replica, step: ScheduledStep | None) -> Collection[Replica]:
        """Returns the replicas to wake after a decision, which may have left requests to others."""
        if step is None and replica.can_schedule:
            self._resting[replica] = None
        else:
            self._resting.pop(replica, None)
        # After an admission, another replica may be the best for the request that is first now.
        return self._wanted(self._for_first() if step is not None and step.admitted else ())

    def after_result(self, replica: Replica) -> Collection[Replica]:
        """Returns the replicas to wake after a result, which may have ended requests; this one comes first."""
        return [replica, *(other for other in self._wanted(self._for_first()) if other is not replica)]

    def after_end(self) -> Collection[Replica]:
        """Returns the replicas to wake after requests ended early: a row is open, and its executor has yet to free
        it."""
        return self._wanted(self._for_first())

    def forget(self, replica: Replica) -> None:
        """Forgets a removed replica."""
        self._resting.pop(replica, None)

    def _wanted(self, others: Collection[Replica]) -> Collection[Replica]:
        wanted = self._scheduler.placement.take_wanted()
        return sorted(wanted.union(others), key=_by_id) if wanted else others

    def _for_first(self) -> Collection[Replica]:
        if not self._resting or not self._scheduler.num_waiting:
            return ()
        first = next((request for request in self._scheduler.waiting if request.blocks.awaited is None), None)
        return () if first is None else self.after_arrival(first)
