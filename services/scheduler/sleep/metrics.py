"""Metrics of the sleep of executors, read at each scrape."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

STATES = ("awake", "weights_offloaded", "discard_all")  # by level, with vLLM's names


class Source(Protocol):
    @property
    def levels(self) -> Mapping[str, int]: ...


class SleepMetrics(Collector):
    """The collector: 1 for the state in which an executor is, 0 for the others."""

    def __init__(self) -> None:
        self.source: Source | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "pagewire:executor_sleep_state",
            "1 for the state of the executor's model: awake, weights_offloaded (sleep of level 1) or discard_all (2)",
            labels=["executor", "sleep_state"],
        )
        for name, level in (self.source.levels if self.source is not None else {}).items():
            for index, state in enumerate(STATES):
                family.add_metric([name, state], float(index == level))
        yield family


METRICS = SleepMetrics()
REGISTRY.register(METRICS)
