"""The order of requests and, from the other end, of preemption."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from operator import attrgetter

from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.values.account import Account
from pagewire.services.scheduler.values.request import Request

# request, arrival number -> its order; unique, smaller first.
Policy = Callable[[Request, int], tuple[int, int]]

by_order = attrgetter("order")


def fcfs(request: Request, arrival: int) -> tuple[int, int]:
    """First come, first served."""
    return (0, arrival)


def priority(request: Request, arrival: int) -> tuple[int, int]:
    """Lower priority values first, first come among equals."""
    return (request.sampling_params.priority, arrival)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def has_priority(waiting: Request, running: Request) -> bool:
    """Returns whether the waiting request may take the blocks and the row of the running one; an earlier arrival is not
    enough."""
    return waiting.order[0] < running.order[0]


def has_turn_before(request: Request, other: Request, is_contended: bool) -> bool:
    """Returns whether `request` is admitted first if both wait. is_contended: there are several tenants, and the least
    served one goes first; among tenants that were served the same, as a newcomer and those it finds, the request with
    the least work."""
    if is_contended and request.account is not other.account:
        return _turn(request) < _turn(other)
    return request.order < other.order


def _turn(request: Request) -> tuple[float, int, int, int]:
    urgency, arrival = request.order
    return request.account.served, urgency, len(request.token_ids) - request.num_computed_tokens, arrival


def keeping_order(running: Iterable[Request]) -> list[Request]:
    """Returns the running requests of several tenants, least served tenant first; the first ones keep their blocks
    longest."""
    return sorted(running, key=lambda request: (request.account.served, request.order))


def victims_of(request: Request, running: Sequence[Request], is_contended: bool) -> list[Request]:
    """Returns the running requests that may be preempted for a waiting one, in the order of preemption: those of lower
    priority. With several tenants, victims belong to the tenant of the waiting request; a tenant without running
    requests may also preempt those of others that have several, first of the most served tenant, but leaves each tenant
    its first request. A request with an earlier turn than the waiting one is no victim: it would be readmitted at
    once."""
    if not is_contended:
        return list(takewhile(lambda victim: has_priority(request, victim), reversed(running)))
    account = request.account
    if account.num_running:
        own = (victim for victim in reversed(running) if victim.account is account)
        return list(takewhile(lambda victim: has_priority(request, victim), own))
    seen = set[Account]()
    firsts = {victim for victim in running if not (victim.account in seen or seen.add(victim.account))}  # type: ignore[func-returns-value]
    return [
        victim
        for victim in reversed(keeping_order(running))
        if victim not in firsts and has_turn_before(request, victim, is_contended)
    ]


def choose_victims(
    request: Request, running: Sequence[Request], is_contended: bool, num_open_rows: int, kv: KVCacheManager
) -> Sequence[Request]:
    """Returns the first candidates (`victims_of`) that have to be preempted to make room for a waiting request; none if
    there is room, or if preempting all of them would not suffice."""
    candidates = victims_of(request, running, is_contended)
    if not candidates:
        return ()
    num_missing_rows = 1 - num_open_rows
    missing = kv.num_missing_blocks(request, kv.get_computed_blocks(request), keep_free=True)  # by group
    for count, victim in enumerate(candidates):
        if num_missing_rows <= 0 and max(missing, default=0) <= 0:
            return candidates[:count]
        num_missing_rows -= 1
        missing = [lack - freed for lack, freed in zip(missing, kv.num_exclusive_blocks(victim), strict=True)]
    return candidates if num_missing_rows <= 0 and max(missing, default=0) <= 0 else ()
