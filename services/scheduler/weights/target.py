"""Which weights each executor is to have: while they are replaced, some have the old ones and some the new.

A request's tokens are all of one version. So an executor that is to have other weights lets its requests end first, and
one that has the weights which a preempted or resumed request needs keeps them, or gets them back, until it has ended.
"""

from collections.abc import Iterable

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.values.executor_info import Weights
from pagewire.services.scheduler.values.request import Request


def version_needed(request: Request) -> str:
    """Of the weights that alone may go on with a request; empty: any may."""
    return request.weights_version if request.num_output_tokens else ""


def is_attached(version: str, replicas: Iterable[Replica]) -> bool:
    return any(replica.info is not None and replica.info.weights.version == version for replica in replicas)


def may_go_over(replica: Replica, scheduler: Scheduler) -> bool:
    """Whether a replica that drains may get other weights: nobody needs its own who could not have them elsewhere."""
    if replica.info is None or not replica.is_drained:
        return False
    version = replica.info.weights.version
    if is_attached(version, (other for other in scheduler.replicas if other is not replica)):
        return True
    return all(version_needed(request) != version for request in scheduler.waiting)


class WeightsPlan:
    """The weights that all executors are to have in the end, and those that they had before."""

    def __init__(self) -> None:
        self.target: Weights | None = None  # None: no executor has come yet
        self._known: dict[str, Weights] = {}  # by version: what executors had, with which requests may have begun

    @property
    def next_number(self) -> int:
        return 1 if self.target is None else self.target.number + 1

    def replace(self, weights: Weights) -> None:
        """From now on all are to have these."""
        self.target = self._known[weights.version] = weights

    def note(self, weights: Weights, replicas: Iterable[Replica]) -> None:
        """An executor comes with these. Those of a higher number were put in force by an earlier scheduler."""
        target = self.target
        is_first = all(replica.info is None for replica in replicas)
        if target is None or weights.number > target.number or (is_first and weights.number == target.number):
            self.target = weights
        self._known[weights.version] = weights

    def wanted(self, present: Weights, waiting: Iterable[Request], replicas: Iterable[Replica]) -> Weights:
        """What an executor is to have that has `present` now: the target, unless it is needed for a waiting request
        that no attached executor can go on with."""
        assert self.target is not None
        needed = {version for request in waiting if (version := version_needed(request))}
        missing = {version for version in needed if not is_attached(version, replicas)}
        if present.version in missing or present.number == self.target.number:
            return present
        known = [self._known[version] for version in missing if version in self._known]
        return known[0] if known else self.target

    def forget_all_but(self, versions: Iterable[str]) -> None:
        """No request needs others any more."""
        kept = set(versions)
        self._known = {version: weights for version, weights in self._known.items() if version in kept}
