"""The choice of one decision: which waiting requests a replica takes, and which it leaves to others."""

from collections.abc import Callable, Collection

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.placement.fleet import Fleet
from pagewire.services.scheduler.placement.replica_load import Fit
from pagewire.services.scheduler.values.request import Request


class Choice:
    """Judges the waiting requests in their turns, for one decision of a replica."""

    def __init__(self, fleet: Fleet, replica: Replica) -> None:
        self._fleet = fleet
        self._replica = replica
        self._verdicts: dict[Request, bool] = {}

    kinds: Collection[bool] = (False, True)

    def staying(self, running: list[Request]) -> list[Request]:
        return running

    def is_anothers(self, request: Request) -> bool:
        """Returns whether the request was left to another replica that has yet to decide."""
        if self._fleet.deferrals.holder(request) is None:
            return False
        return self._fleet.kept_for(request) not in (None, self._replica)

    def takes(self, request: Request) -> bool:
        """Returns whether the deciding replica takes this request at its turn."""
        if len(self._fleet) == 1:
            return True
        verdict = self._verdicts.get(request)
        if verdict is None:
            verdict = self._verdicts[request] = self._decide(request)
        return verdict

    def _decide(self, request: Request) -> bool:
        fleet, replica = self._fleet, self._replica
        if fleet.is_suspect(request):
            chosen = fleet.choose_for_suspect(request)
            if chosen is not None and chosen is not replica:
                fleet.want(chosen)
            return chosen is replica
        fits = fleet.candidates(request, replica, fleet.deferrals.requests)
        own = fits.get(replica.replica_id)
        if own is None:  # its executor is about to end, and others may have left the request to it before
            if fits:
                best_id = best(fleet, fits)
                fleet.defer(request, best_id, fits[best_id])
            return False
        if not fleet.has_place(replica.replica_id, own):
            # This replica could make room, but so could the others, and one that already has room is better.
            return not any(fleet.has_place(replica_id, fit) for replica_id, fit in fits.items())
        deferred_to = fleet.deferrals.of_replica
        # Another replica without a place is only worth waiting for if more of the prompt is cached there.
        better = {
            replica_id: fit
            for replica_id, fit in fits.items()
            if fit.num_cached > own.num_cached or fleet.has_place(replica_id, fit, deferred_to(replica_id))
        }
        best_id = best(fleet, better | {replica.replica_id: own})
        if best_id == replica.replica_id:
            return True
        fleet.defer(request, best_id, fits[best_id])
        return False


class ApartChoice(Choice):
    """Judges the waiting requests where executors have roles."""

    def __init__(self, fleet: Fleet, replica: Replica) -> None:
        super().__init__(fleet, replica)
        self.kinds = fleet.roles.kinds(replica)

    def staying(self, running: list[Request]) -> list[Request]:
        stays, replica = self._fleet.roles.stays, self._replica
        return [request for request in running if not request.num_output_placeholders or stays(replica, request)]

    def is_anothers(self, request: Request) -> bool:
        return not self._fleet.roles.allow(self._replica, request) or super().is_anothers(request)


def best(fleet: Fleet, fits: dict[int, Fit]) -> int:
    """Returns the best of these replicas."""
    deferred_to = fleet.deferrals.of_replica
    return min(fits, key=lambda replica_id: fleet.rank(replica_id, fits[replica_id], deferred_to(replica_id)))


def choose(fleet: Fleet, request: Request, suits: Callable[[Replica, Request], bool] | None = None) -> Replica | None:
    """Returns the best replica with room for a waiting request. suits: see `Fleet.candidates`."""
    if fleet.is_suspect(request):
        return fleet.choose_for_suspect(request) if suits is None else None
    fits = fleet.candidates(request, None, suits=suits)
    if not any(fleet.has_place(replica_id, fit) for replica_id, fit in fits.items()):
        return None
    return fleet.replica(best(fleet, fits))
