"""Metrics of tenants. As each series costs storage, only the most active tenants have their own; the others share
one."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pagewire.telemetry.tenant_metrics import label_of

MAX_NAMED = 20
# The seconds after which the tenants with their own series are chosen again.
PERIOD_S = 600.0
# The most tenants counted within a period; further ones get no separate series in the next period.
MAX_COUNTED = 10_000
# The label of all other tenants, and of a tenant with this name.
OTHER = "other"


@dataclass(slots=True)
class _Totals:
    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    queue_seconds: float = 0.0


_FAMILIES: dict[str, tuple[str, Callable[[_Totals], float]]] = {
    "pagewire:tenant_requests": ("Requests that ended", lambda one: one.requests),
    "pagewire:tenant_prompt_tokens": ("Prompt tokens of requests that were admitted", lambda one: one.prompt_tokens),
    "pagewire:tenant_generation_tokens": ("Tokens generated", lambda one: one.generation_tokens),
    "pagewire:tenant_queue_seconds": ("Time that requests waited for their first step", lambda one: one.queue_seconds),
}
_TEXT = (
    f", by tenant: the {MAX_NAMED} that use most tokens have their own series, which begin at 0 when a tenant becomes"
    " one of them; the label is other for all others, and none for requests without a tenant"
)


class TenantStats(Collector):
    """The totals by tenant. They never decrease: a tenant's usage before it got its series stays in that of the
    others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = clock() + PERIOD_S
        self._used: defaultdict[str, int] = defaultdict(int)  # tokens, in this period
        self._named: dict[str, _Totals] = {}
        self._other = _Totals()

    def on_first_step(self, tenant: str, num_prompt_tokens: int, waited: float) -> None:
        totals = self._totals(tenant, num_prompt_tokens)
        totals.prompt_tokens += num_prompt_tokens
        totals.queue_seconds += waited

    def on_end(self, tenant: str, num_output_tokens: int) -> None:
        totals = self._totals(tenant, num_output_tokens)
        totals.requests += 1
        totals.generation_tokens += num_output_tokens

    def _totals(self, tenant: str, num_tokens: int) -> _Totals:
        tenant = label_of(tenant)
        if self._clock() >= self._ends:
            self._choose()
        if tenant in self._used or len(self._used) < MAX_COUNTED:
            self._used[tenant] += num_tokens
        if tenant == OTHER:
            return self._other
        if (totals := self._named.get(tenant)) is not None:
            return totals
        if len(self._named) < MAX_NAMED:
            return self._named.setdefault(tenant, _Totals())
        return self._other

    def _choose(self) -> None:
        """Chooses the most active tenants, which keep their series or get one on their next use; after a tie, a series
        is kept."""
        self._used.pop(OTHER, None)
        order = sorted(self._used, key=lambda name: (self._used[name], name in self._named), reverse=True)
        leading = set(order[:MAX_NAMED])
        for name in [name for name in self._named if name not in leading and len(order) > MAX_NAMED]:
            del self._named[name]
        for name in order[:MAX_NAMED]:
            if len(self._named) < MAX_NAMED:
                self._named.setdefault(name, _Totals())
        self._used.clear()
        self._ends = self._clock() + PERIOD_S

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        for name, (text, value) in _FAMILIES.items():
            family = CounterMetricFamily(name, text + _TEXT, labels=["tenant"])
            for tenant, totals in list(self._named.items()):  # a scrape may come on another thread
                family.add_metric([tenant], value(totals))
            family.add_metric([OTHER], value(self._other))
            yield family


TENANTS = TenantStats()
REGISTRY.register(TENANTS)
