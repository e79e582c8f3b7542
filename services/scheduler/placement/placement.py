"""The rules by which replicas take waiting requests, by the names of --placement.

Requests wait at the scheduler, never at a replica, and are placed only when a replica decides a step with room for
them, so no request waits because of a wrong early decision. The replica compares only a few candidates: those with most
of the request's prefix, by an index of all blocks (`prefix_index.py`), those with the fewest running requests, and
itself. If another candidate is better (`replica_load.py`), the replica leaves the request to it. Each leaves a request
only to a better one, so the best one takes it.
"""

from collections.abc import Callable, Collection, Sequence

from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.placement.choice import ApartChoice, Choice, choose
from pagewire.services.scheduler.placement.deferrals import NONE_DEFERRED, DeferredRequests
from pagewire.services.scheduler.placement.fleet import Fleet
from pagewire.services.scheduler.placement.replica_load import Deferred, Fit
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep


class CacheAware(Fleet):
    """Places a request where it costs all requests together the least time, cached prefixes included."""

    def taker(self, replica: Replica) -> Choice:
        """Drops the deferrals to the replica, which now judges these requests; other replicas judge those that it
        leaves again."""
        self.deferrals.forget(replica.replica_id)
        if not self.roles.are_apart:
            return Choice(self, replica)
        self._follow_roles()
        self.roles.before_decision(replica)
        return ApartChoice(self, replica)

    def on_result(self, replica: Replica, outputs: Outputs) -> Sequence[Request]:
        super().on_result(replica, outputs)
        if not self.roles.are_apart:
            return ()
        self._follow_roles()
        leaving = self.roles.on_result(replica, outputs, self._decoder_of)
        self._wanted |= self.roles.take_wanted()
        self._wanted.update(filter(None, (choose(self, request) for request in leaving)))
        return leaving

    def _decoder_of(self, request: Request) -> Replica | None:
        """Returns the replica that would decode a request of which the prompt is being computed."""
        return choose(self, request, self.roles.decodes)

    def choice(self, request: Request) -> Replica | None:
        return self.kept_for(request) or choose(self, request)

    def near(self, request: Request) -> Collection[Replica]:
        """Returns the replicas with most of the request's prefix, and those with the fewest requests."""
        return [self._replicas[replica_id] for replica_id in self.candidates(request, None)]


class LeastLoad(CacheAware):
    """Places a request where the fewest run, regardless of cached prefixes."""

    def rank(self, replica_id: int, fit: Fit, deferred: Deferred) -> tuple[float, ...]:
        num = self._replicas[replica_id].num_running + deferred.num
        taken = self._last_taken.get(replica_id, 0)
        return not self.has_place(replica_id, fit, deferred), num, not fit.has_adapter, taken, replica_id

    @property
    def _is_by_prefix(self) -> bool:
        return False


class RoundRobin(LeastLoad):
    """Places requests on the replicas with room in turns; for comparison."""

    _last = -1

    def on_step(self, replica: Replica, step: ScheduledStep | None) -> None:
        super().on_step(replica, step)
        if step is not None and step.admitted:
            self._last = replica.replica_id

    def candidates(
        self,
        request: Request,
        decider: Replica | None,
        deferred: DeferredRequests = NONE_DEFERRED,
        suits: Callable[[Replica, Request], bool] | None = None,
    ) -> dict[int, Fit]:
        suits = suits or self._suits
        suiting = [one for one in self._by_load() if suits(one, request) and not one.has_suspect]
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
