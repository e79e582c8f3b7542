"""The weights that each executor should have; during a replacement, some have the old ones, some the new ones.

All tokens of a request come from one version. So an executor finishes its requests before it switches, and while a
preempted or resumed request needs old weights, one executor keeps them or gets them back.
"""

from collections.abc import Iterable

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.values.executor_info import Weights
from pagewire.services.scheduler.values.request import Request


def version_needed(request: Request) -> str:
    """Returns the version of the weights that a request needs to continue; empty: any version."""
    return request.weights_version if request.num_output_tokens else ""


def is_attached(version: str, replicas: Iterable[Replica]) -> bool:
    return any(replica.info is not None and replica.info.weights.version == version for replica in replicas)


def may_switch(replica: Replica, scheduler: Scheduler) -> bool:
    """Returns whether a draining replica may get other weights: no request needs weights that only this replica has."""
    if replica.info is None or not replica.is_drained:
        return False
    version = replica.info.weights.version
    if is_attached(version, (other for other in scheduler.replicas if other is not replica)):
        return True
    return all(version_needed(request) != version for request in scheduler.waiting)


class WeightsPlan:
    """The target weights of all executors, and the weights that they had before."""

    def __init__(self) -> None:
        self.target: Weights | None = None  # None: no executor has connected yet
        self._known: dict[str, Weights] = {}  # by version, all weights that requests may have begun with

    @property
    def next_number(self) -> int:
        return 1 if self.target is None else self.target.number + 1

    def replace(self, weights: Weights) -> None:
        """Makes these weights the target."""
        self.target = self._known[weights.version] = weights

    def note(self, weights: Weights, replicas: Iterable[Replica]) -> None:
        """Takes in the weights of an executor that connects. A higher `number` comes from an earlier scheduler."""
        target = self.target
        is_first = all(replica.info is None for replica in replicas)
        if target is None or weights.number > target.number or (is_first and weights.number == target.number):
            self.target = weights
        self._known[weights.version] = weights

    def wanted(self, present: Weights, waiting: Iterable[Request], replicas: Iterable[Replica]) -> Weights:
        """Returns the weights that an executor with `present` should have: the target, unless the executor is needed
        for a waiting request that no attached one can continue."""
        assert self.target is not None
        needed = {version for request in waiting if (version := version_needed(request))}
        missing = {version for version in needed if not is_attached(version, replicas)}
        if present.version in missing or present.number == self.target.number:
            return present
        known = [self._known[version] for version in missing if version in self._known]
        return known[0] if known else self.target

    def forget_all_but(self, versions: Iterable[str]) -> None:
        """Forgets the weights of all other versions, which no request needs any longer."""
        kept = set(versions)
        self._known = {version: weights for version, weights in self._known.items() if version in kept}
