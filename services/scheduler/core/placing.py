"""The seam of placement: which of several replicas takes a waiting request."""

from collections.abc import Collection, Sequence
from typing import Protocol

from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.seams import Taker
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep


class Placement(Protocol):
    """Knows the replicas, and follows what they run."""

    def add(self, replica: Replica) -> None: ...

    def remove(self, replica: Replica) -> None:
        """Forgets a replica without an executor."""

    def note(self, replica: Replica) -> None:
        """Takes in that requests began or ended on a replica, or that its executor came or went."""

    def on_step(self, replica: Replica, step: ScheduledStep | None) -> None:
        """Takes in a decision of a replica; None: nothing runs."""

    def on_result(self, replica: Replica, outputs: Outputs) -> Sequence[Request]:
        """Takes in a result; returns the running requests that go on at another replica."""

    def taker(self, replica: Replica) -> Taker:
        """Returns the taker for the replica's present decision."""

    def choice(self, request: Request) -> Replica | None:
        """Returns the replica that would take a waiting request if all decided now; None if none has room, or any may
        take it."""

    def want(self, replica: Replica) -> None:
        """Adds the replica to the next result of `take_wanted`."""

    def take_wanted(self) -> set[Replica]:
        """Returns the replicas that have a reason to decide since the last call."""

    def least_loaded(self, num: int = 4) -> Sequence[Replica]:
        """Returns up to num replicas with an executor that take new requests, the least busy first."""

    def near(self, request: Request) -> Collection[Replica]:
        """Returns the replicas that may take a request."""

    @property
    def num_present(self) -> int:
        """The number of replicas with an executor that take new requests."""

    @property
    def kinds_before_new(self) -> Collection[bool]:
        """The kinds of waiting requests, as in `Taker.kinds`, that may have their turn before a new one."""

    @property
    def best_known(self) -> Replica | None:
        """The replica with the most measured steps among those that take new requests."""
