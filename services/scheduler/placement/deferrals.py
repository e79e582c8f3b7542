"""Waiting requests that replicas left to others, which have yet to decide."""

from pagewire.services.scheduler.placement.replica_load import NOTHING_DEFERRED, Deferred, Fit
from pagewire.services.scheduler.values.request import Request

# By the ids of the replicas that should take them.
DeferredRequests = dict[int, list[Request]]
NONE_DEFERRED: DeferredRequests = {}


class Deferrals:
    """The replica that each deferred request was left to, until that replica decides. Replicas are known by their
    ids."""

    def __init__(self) -> None:
        self.requests: DeferredRequests = {}
        self._holders: dict[Request, int] = {}
        self._totals: dict[int, Deferred] = {}

    def add(self, request: Request, replica_id: int, fit: Fit) -> None:
        self._holders[request] = replica_id
        self._totals.setdefault(replica_id, Deferred()).add(fit)
        self.requests.setdefault(replica_id, []).append(request)

    def holder(self, request: Request) -> int | None:
        """Returns the replica that the request was left to, if it has not decided since."""
        return self._holders.get(request)

    def of_replica(self, replica_id: int) -> Deferred:
        return self._totals.get(replica_id, NOTHING_DEFERRED)

    def forget(self, replica_id: int) -> None:
        """Drops the deferrals to a replica, which decides now or was removed."""
        self._totals.pop(replica_id, None)
        for request in self.requests.pop(replica_id, ()):
            if self._holders.get(request) == replica_id:
                del self._holders[request]
