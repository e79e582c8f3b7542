"""The waiting requests that have their turn before a new one, for forecasts."""

from bisect import bisect_left
from collections.abc import Collection

from pagewire.services.scheduler.core.policy import by_order
from pagewire.services.scheduler.core.waiting import WaitingQueue
from pagewire.services.scheduler.values.request import Request


def ahead(
    waiting: WaitingQueue, request: Request, *, is_behind_long_ones: bool, kinds: Collection[bool]
) -> tuple[float, float]:
    """Returns how many requests have their turn before a request that has its order but does not wait yet, and about
    how many tokens they have: those of its tenant by policy, and at most as many of each other tenant.

    kinds: the requests that count, as in `Taker.kinds`.
    """
    num = num_tokens = 0.0
    others: dict[str, tuple[int, int]] = {}
    for key, lane in waiting.lanes.items():
        account, is_long, has_output = key
        lane_tokens = waiting.num_tokens[key]
        if has_output not in kinds:
            continue
        if account.tenant != request.tenant.name:
            num_others, other_tokens = others.get(account.tenant, (0, 0))
            others[account.tenant] = num_others + len(lane), other_tokens + lane_tokens
        elif is_behind_long_ones or not is_long:
            num_lane = bisect_left(lane, request.order, key=by_order)
            num += num_lane
            num_tokens += lane_tokens * num_lane / len(lane)
    num_own = num
    for num_others, other_tokens in others.values():
        part = min(1.0, num_own / num_others)
        num += part * num_others
        num_tokens += part * other_tokens
    return num, num_tokens
