"""The seams where features join the core: what it asks of them.

`compose.py` hands the features in. The seam of placement is in `placing.py`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.values.account import Account
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult

# -- the choice among waiting requests --------------------------------------------------------------------------------


class Taker(Protocol):
    """Chooses among the waiting requests, for one step of a replica."""

    kinds: Collection[bool]  # True: the replica takes requests with output, False: those without

    def takes(self, request: Request) -> bool:
        """Returns whether the replica takes a request when its turn comes."""

    def is_anothers(self, request: Request) -> bool:
        """Returns whether the request is known to belong to another replica, without a look-up."""

    def staying(self, running: list[Request]) -> list[Request]:
        """Returns the running requests without those that leave with a token in flight, in the same order."""


# -- speculation -----------------------------------------------------------------------------------------------------


class DraftPlan(Protocol):
    """The number of tokens that a step drafts for each request."""

    @property
    def methods(self) -> Mapping[int, int]:
        """The executor's method for each request, by id; by default the first."""

    @property
    def is_empty(self) -> bool:
        """True if no request drafts."""

    def of(self, request: Request) -> int: ...


class Drafts(Protocol):
    """Speculation on one executor."""

    def plan(self, runners: Sequence[Request]) -> DraftPlan:
        """Plans the next step, in which these requests may run; called for each step with room for drafts."""

    def expected(self, step: ScheduledStep) -> float:
        """Returns how many of the drafts that a step asks for are likely to be found."""

    def learn(self, step: ScheduledStep, result: StepResult, seconds: float) -> None:
        """Learns from a step, and removes drafts that were not found from its work. seconds: its duration; 0:
        unknown."""


# -- shares of tenants -----------------------------------------------------------------------------------------------


class Shares(Protocol):
    """The accounts by which the requests of several tenants take turns."""

    @property
    def is_contended(self) -> bool:
        """True if several tenants have requests; otherwise there is nothing to divide."""

    def account(self, tenant: str, weight: float) -> Account:
        """Returns the tenant's account, with this weight from now on; 0 stands for 1."""

    def share(self, account: Account) -> float:
        """Returns the tenant's share, above 0 and at most 1, among itself and all tenants with requests."""

    def count(self, account: Account, *, waiting: int = 0, running: int = 0) -> None:
        """Adds to the numbers of requests of the tenant that wait and run."""

    def charge_prompt(self, request: Request, end: int) -> None:
        """Charges the tokens of a prompt that a step computes, up to position `end`."""

    def charge_outputs(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> None:
        """Charges the tokens that running requests gained."""

    def least_served_running(self) -> float:
        """Returns the lowest counter among the tenants with running requests."""


# -- requests that may have crashed an executor ----------------------------------------------------------------------


class Quarantine(Protocol):
    """Keeps suspects out of the steps of other requests, on one replica."""

    @property
    def is_closed(self) -> bool:
        """True while a suspect runs, so that no other request may enter."""

    def is_suspect(self, request: Request) -> bool:
        """Returns whether the request has to run alone."""

    def runners(self, running: list[Request], is_suspect_due: bool, is_idle: bool) -> list[Request]:
        """Returns the running requests that may be in the next step.

        is_suspect_due: a suspect is first in line, and there is room for it. is_idle: no step is in flight.
        """

    def admits(self, request: Request, is_alone: bool) -> bool:
        """Returns whether a waiting request may enter. is_alone: no other request is in its step or in a step in
        flight."""

    def enter(self, request: Request) -> None:
        """Takes in that a request was admitted."""


@dataclass(frozen=True, slots=True)
class LostExecutor:
    """The facts about an executor that a replica has lost."""

    replica_id: int
    incarnation: int | None  # None: it had none
    in_flight: Sequence[ScheduledStep]
    loss: Loss
    was_leaving: bool  # it had announced its end


class Suspects(Protocol):
    """Finds the requests that crash executors."""

    def quarantine(self) -> Quarantine:
        """Returns the quarantine of a replica that has a new executor."""

    def on_lost(self, lost: LostExecutor, requests: Sequence[Request]) -> Mapping[Request, int]:
        """Takes in that an executor was lost. requests: all that are live.

        Returns:
            The requests that end because every executor that ran them failed, with the number of lost executors.
        """

    def on_successor(self, replica_id: int, info: ExecutorInfo, requests: Sequence[Request]) -> Mapping[Request, int]:
        """Takes in what the next executor reports about its predecessor; returns the same as `on_lost`."""


class Slots(Protocol):
    """The slots of one executor for the adapters of its running requests."""

    def take(self, request: Request) -> bool:
        """Returns whether a waiting request could enter now, as far as its adapter is concerned."""

    def holds(self, request: Request) -> bool:
        """Returns whether a request finds its adapter in a slot, or has none."""

    def reserve(self, request: Request) -> None:
        """Takes in that a request is passed over. The first one that lacks a slot reserves one."""

    def enter(self, request: Request) -> int:
        """Gives a request that enters the slot of its adapter, and returns its number; 0: it has no adapter."""

    def leave(self, request: Request) -> None:
        """Takes in that a running request has ended or was preempted."""

    def take_changes(self) -> list[tuple[int, str]]:
        """Returns the slots that got another adapter since the last call, with its digest."""


@dataclass(frozen=True, slots=True)
class Features:
    """The features that take part in the decisions of replicas."""

    shares: Shares
    suspects: Suspects
    drafts: Callable[[ExecutorInfo | None], Drafts]  # None: without an executor
    slots: Callable[[ExecutorInfo | None], Slots]
    on_memory: Callable[[int, ExecutorInfo | None, KVCacheManager], None]  # by replica id: its new, empty memory
