"""Metrics of adapters, read at each scrape. As clients choose names, only the first have a series of their own."""

import time
from collections.abc import Collection, Iterator
from typing import Protocol

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_NAMED = 100
# The label of all other adapters.
OTHER = "other"


class Source(Protocol):
    """The state of the adapters."""

    @property
    def num_slots(self) -> int: ...

    @property
    def running_names(self) -> Collection[str]: ...

    @property
    def waiting_names(self) -> Collection[str]: ...


class AdapterMetrics(Collector):
    """The collector of the metrics; a line without slots for adapters has none."""

    def __init__(self) -> None:
        self.source: Source | None = None
        self._num_requests: dict[str, int] = {}

    def on_request(self, name: str) -> None:
        """Counts a request that needs an adapter."""
        if name not in self._num_requests and len(self._num_requests) >= MAX_NAMED:
            name = OTHER
        self._num_requests[name] = self._num_requests.get(name, 0) + 1

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        if self.source is None or not self.source.num_slots:
            return
        info = GaugeMetricFamily(
            "pagewire:lora_requests_info",
            "The time of this sample; labels: slots for adapters of an executor, and the adapters of running and of"
            " waiting requests",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running, waiting = (",".join(sorted(names)) for names in (self.source.running_names, self.source.waiting_names))
        info.add_metric([str(self.source.num_slots), running, waiting], time.time())
        yield info
        requests = CounterMetricFamily(
            "pagewire:adapter_requests",
            f"Requests by adapter: the first {MAX_NAMED} names have their own series, the label is other for the rest",
            labels=["adapter"],
        )
        for name, count in tuple(self._num_requests.items()):
            requests.add_metric([name], count)
        yield requests


METRICS = AdapterMetrics()
REGISTRY.register(METRICS)
