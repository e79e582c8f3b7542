"""The rules by which replicas take waiting requests, by the names of --placement.

Requests wait at the scheduler, never at a replica, and are placed when a replica decides a step that has room for them:
so late that no request waits behind a decision that was wrong. The replica compares a few replicas only: those that
hold most of the request's prefix, by an index of all blocks (`prefix_index.py`), those with the fewest running
requests, and itself. If another of them is better (`replica_load.py`), it leaves the request to that one. Each leaves a
request only to a better replica, so the best one takes it.
"""

from collections.abc import Collection

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.placement.choice import Choice, choose
from pagewire.services.scheduler.placement.deferrals import NONE_DEFERRED, DeferredRequests
from pagewire.services.scheduler.placement.fleet import Fleet
from pagewire.services.scheduler.placement.replica_load import Deferred, Fit
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep


class CacheAware(Fleet):
    """A request goes where it costs all requests together the least time, cached prefixes included."""

    def taker(self, replica: Replica) -> Choice:
        """Requests that were left to the replica are its own to judge; those that it leaves again, other replicas
        judge."""
        self.deferrals.forget(replica.replica_id)
        return Choice(self, replica)

    def choice(self, request: Request) -> Replica | None:
        return self.kept_for(request) or choose(self, request)

    def near(self, request: Request) -> Collection[Replica]:
        """Returns those that hold most of its prefix, and those with the fewest requests."""
        return [self._replicas[replica_id] for replica_id in self.candidates(request, None)]


class LeastLoad(CacheAware):
    """A request goes where the fewest run, whatever is cached."""

    def rank(self, replica_id: int, fit: Fit, deferred: Deferred) -> tuple[float, ...]:
        num = self._replicas[replica_id].num_running + deferred.num
        return not self.has_place(replica_id, fit, deferred), num, self._last_taken.get(replica_id, 0), replica_id

    @property
    def _is_by_prefix(self) -> bool:
        return False


class RoundRobin(LeastLoad):
    """Requests go to one replica after the other, of those with room; for comparison."""

    _last = -1

    def on_step(self, replica: Replica, step: ScheduledStep | None) -> None:
        super().on_step(replica, step)
        if step is not None and step.admitted:
            self._last = replica.replica_id

    def candidates(
        self, request: Request, decider: Replica | None, deferred: DeferredRequests = NONE_DEFERRED
    ) -> dict[int, Fit]:
        suiting = [one for one in self._by_load() if one.suits(request) and not one.has_suspect]
        takers = [one for one in suiting if not one.is_leaving] or suiting
        return {one.replica_id: self._views[one.replica_id].fit(request, (), 1.0) for one in takers}

    def rank(self, replica_id: int, fit: Fit, deferred: Deferred) -> tuple[float, ...]:
        turn = (replica_id - self._last - 1) % (max(self._replicas) + 1)
        return not self.has_place(replica_id, fit, deferred), deferred.num, turn


PLACEMENTS: dict[str, type[CacheAware]] = {
    "cache_aware": CacheAware,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
}
