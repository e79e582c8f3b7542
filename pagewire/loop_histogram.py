"""A histogram for what is observed often, on one thread."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar


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
        self._exemplars: list[Exemplar | None] = [None] * len(self._counts)  # the latest of each bucket
        REGISTRY.register(self)

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """exemplar: labels of a trace that has this value."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(dict(exemplar), value, time.time())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(repr, self._bounds), "+Inf"]
        buckets: Any = list(zip(names, accumulate(self._counts), self._exemplars, strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)
