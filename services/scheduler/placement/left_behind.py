"""Waiting requests that replicas have left to others, which are to decide next."""

from pagewire.services.scheduler.core.request import Request
from pagewire.services.scheduler.placement.replica_load import NOBODY, Newcomer, Queued

# By the ids of the replicas they were left to.
Left = dict[int, list[Request]]
NO_LEFT: Left = {}
_NOBODY_ID = -1


class LeftBehind:
    """Who was left to whom, until that one decides. All replicas are known by their ids."""

    def __init__(self) -> None:
        self.requests: Left = {}
        self._num_decisions: dict[int, int] = {}
        self._queued: dict[int, Queued] = {}

    def leave(self, request: Request, replica_id: int, newcomer: Newcomer) -> None:
        request.left_to = (replica_id, self._num_decisions.get(replica_id, 0))
        self._queued.setdefault(replica_id, Queued()).add(newcomer)
        self.requests.setdefault(replica_id, []).append(request)

    def holder(self, request: Request) -> int:
        """To whom it was left that has not decided since; below 0: nobody."""
        if request.left_to is None:
            return _NOBODY_ID
        replica_id, num_decisions = request.left_to
        return replica_id if self._num_decisions.get(replica_id, 0) == num_decisions else _NOBODY_ID

    def queue_of(self, replica_id: int) -> Queued:
        return self._queued.get(replica_id, NOBODY)

    def forget(self, replica_id: int) -> None:
        """It decides now."""
        self._num_decisions[replica_id] = self._num_decisions.get(replica_id, 0) + 1
        self._queued.pop(replica_id, None)
        self.requests.pop(replica_id, None)

    def remove(self, replica_id: int) -> None:
        """It is gone; no other will have its id."""
        self.forget(replica_id)
        del self._num_decisions[replica_id]
