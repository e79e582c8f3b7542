"""A histogram and a counter for frequent observations on one thread."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString


class Observations:
    """The observations of one set of labels."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: list[Exemplar | None] = [None] * len(self._counts)  # the latest of each bucket

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Counts a value. exemplar: labels of a trace with this value."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(dict(exemplar), value, time.time())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets: Any = list(zip(names, accumulate(self._counts), self._exemplars, strict=True))
        family.add_metric(labels, buckets, self._sum)


class LoopHistogram(Collector):
    """A histogram without the locks and lookups of the library, which cost microseconds. Only one thread may
    observe."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> None:
        """buckets: upper bounds in ascending order, without infinity. labels: names; a series begins with the first
        use of its values."""
        self._name = name
        self._documentation = documentation
        self._label_names = tuple(labels)
        self._bounds = tuple(float(bound) for bound in buckets if bound != float("inf"))
        self._series: dict[tuple[str, ...], Observations] = {}
        if not labels:
            self.observe = self.labels().observe
        REGISTRY.register(self)

    def labels(self, *values: str) -> Observations:
        """Returns the observations of these label values, in the order of the names."""
        series = self._series.get(values)
        if series is None:
            if len(values) != len(self._label_names):
                raise ValueError(f"{self._name} has the labels {self._label_names}, not {values}")
            series = self._series[values] = Observations(self._bounds)
        return series

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        for values, series in list(self._series.items()):
            series.add_to(family, values)
        yield family


class LoopCounter(Collector):
    """A counter without the library's lock and checks. Only one thread may count."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name = name
        self._documentation = documentation
        self._count = 0
        REGISTRY.register(self)

    def inc(self, number: int = 1) -> None:
        self._count += number

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._documentation, value=self._count)
