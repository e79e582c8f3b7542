"""A histogram for what is observed often, on one thread."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class LoopHistogram(Collector):
    """Without the lock and the search that cost the library's own
    microseconds each time. Only one thread observes."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        """buckets: upper bounds in ascending order, infinity left out."""
        self._name = name
        self._documentation = documentation
        self._bounds = [bound for bound in buckets if bound != float("inf")]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        REGISTRY.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(repr, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)
