"""Recent rates, latencies and requests of a service, for its status. Recording is cheap; reading sorts."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from pagewire.v1.admin_pb2 import RecentLatency, RequestAccount

RATE_S = 5
LATENCY_S = 30.0
MAX_LATENCIES = 1000
MAX_ACCOUNTS = 1000


def goes_by(one: str, request_id: str) -> bool:
    """Returns whether an id belongs to a request, or to one of its choices."""
    return one == request_id or (one.startswith(f"{request_id}-") and one[len(request_id) + 1 :].isdigit())


class Unended(Protocol):
    """A running request."""

    @property
    def account_owner(self) -> tuple[str, str]:
        """The tenant, and the id that the client gave; "" if there is none."""

    def account(self) -> RequestAccount:
        """Returns the account so far."""


class Accounts:
    """Accounts of the time of running requests and of the latest ended ones."""

    def __init__(self, unended: Callable[[], Iterable[Unended]]) -> None:
        """unended: returns the running requests."""
        self._unended = unended
        self._accounts: deque[tuple[str, RequestAccount]] = deque(maxlen=MAX_ACCOUNTS)

    def add(self, tenant: str, account: RequestAccount) -> None:
        self._accounts.append((tenant, account))

    def find(self, request_id: str, tenant: str | None) -> list[RequestAccount]:
        """Returns the accounts of all attempts at a request and its choices, the latest last. tenant: None: any
        tenant."""
        ended = [
            account
            for owner, account in self._accounts
            if tenant in (None, owner) and goes_by(account.request_id, request_id)
        ]
        for one in self._unended():
            owner, own_id = one.account_owner
            if tenant in (None, owner) and own_id and goes_by(own_id, request_id):
                ended.append(one.account())
        return ended


class Rate:
    """Events per second, over the last RATE_S whole seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._clock = clock
        self._counts = [0] * (RATE_S + 1)  # by second, including the current one
        self._second = int(clock())

    def add(self, count: int) -> None:
        self._turn()
        self._counts[self._second % len(self._counts)] += count
        self.total += count

    @property
    def per_second(self) -> float:
        self._turn()
        present = self._counts[self._second % len(self._counts)]
        return (sum(self._counts) - present) / RATE_S

    def _turn(self) -> None:
        second = int(self._clock())
        if second == self._second:
            return
        for passed in range(self._second + 1, min(second, self._second + len(self._counts)) + 1):
            self._counts[passed % len(self._counts)] = 0
        if second - self._second > len(self._counts):
            self._counts = [0] * len(self._counts)
        self._second = second


class Latencies:
    """The latencies of the last LATENCY_S seconds, at most MAX_LATENCIES."""

    def __init__(self) -> None:
        self._observed: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)

    def observe(self, now: float, seconds: float) -> None:
        """Adds a latency. now: time.monotonic()."""
        self._observed.append((now, seconds))

    def to_message(self, now: float) -> RecentLatency:
        while self._observed and self._observed[0][0] < now - LATENCY_S:
            self._observed.popleft()
        if not self._observed:
            return RecentLatency()
        values = sorted(seconds for _, seconds in self._observed)
        return RecentLatency(
            count=len(values),
            p50_seconds=values[len(values) // 2],
            p95_seconds=values[min(len(values) - 1, len(values) * 95 // 100)],
        )
