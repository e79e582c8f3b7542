"""The rules of placement, by the names of --placement."""

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.request import Request
from pagewire.services.scheduler.core.step import ScheduledStep
from pagewire.services.scheduler.placement.left_behind import NO_LEFT, Left
from pagewire.services.scheduler.placement.placement import Placement
from pagewire.services.scheduler.placement.replica_load import Newcomer, Queued


class LeastLoad(Placement):
    """Where the fewest run, whatever is cached."""

    def rank(self, replica_id: int, newcomer: Newcomer, queued: Queued) -> tuple[float, ...]:
        num = self._replicas[replica_id].num_running + queued.num
        return not self.has_place(replica_id, newcomer, queued), num, self._last_taken.get(replica_id, 0), replica_id

    @property
    def _is_by_prefix(self) -> bool:
        return False


class RoundRobin(LeastLoad):
    """One after the other, of those with room; for comparison."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def on_step(self, replica: Replica, step: ScheduledStep | None) -> None:
        super().on_step(replica, step)
        if step is not None and step.admitted:
            self._last = replica.replica_id

    def candidates(self, request: Request, decider: Replica | None, left: Left = NO_LEFT) -> dict[int, Newcomer]:
        suiting = [one for one in self._by_load() if one.suits(request) and not one.has_suspect]
        takers = [one for one in suiting if not one.is_leaving] or suiting
        return {one.replica_id: one.place.newcomer(request, (), 1.0) for one in takers}

    def rank(self, replica_id: int, newcomer: Newcomer, queued: Queued) -> tuple[float, ...]:
        turn = (replica_id - self._last - 1) % (max(self._replicas) + 1)
        return not self.has_place(replica_id, newcomer, queued), queued.num, turn


PLACEMENTS = {"cache_aware": Placement, "least_load": LeastLoad, "round_robin": RoundRobin}
