"""Metrics of each replica, read at each scrape: they cost a step nothing, and a removed replica has none."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler

_LABELS = ["executor"]
_GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "pagewire:executor_requests_running": ("Requests that run on the executor", lambda one: one.num_running),
    "pagewire:executor_kv_cache_usage_perc": (
        "Share of the executor's KV blocks in use, 0 to 1, of the fullest group of layers",
        lambda one: one.kv.usage,
    ),
    "pagewire:executor_is_leaving": (
        "1 if the executor is about to end, so that it takes no requests while there are others",
        lambda one: float(one.is_leaving),
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "pagewire:executor_prefix_cache_queries": (
        "Tokens looked up in the executor's prefix cache",
        lambda one: one.counts.num_prefix_queries,
    ),
    "pagewire:executor_prefix_cache_hits": (
        "Tokens found in the executor's prefix cache",
        lambda one: one.counts.num_prefix_hits,
    ),
    "pagewire:executor_generation_tokens": (
        "Tokens that the executor generated",
        lambda one: one.counts.num_generation_tokens,
    ),
    "pagewire:executor_preemptions": (
        "Times a request on the executor lost its KV blocks",
        lambda one: one.counts.num_preemptions,
    ),
}


def _cache_config(replicas: Sequence[Replica]) -> Metric:
    family = GaugeMetricFamily(
        "pagewire:executor_cache_config_info",
        "Always 1; labels: tokens per KV block, and the blocks of the executor's largest group of layers",
        labels=[*_LABELS, "block_size", "num_gpu_blocks"],
    )
    for replica in replicas:
        if (info := replica.info) is not None:
            family.add_metric([replica.name, str(info.block_size), str(info.num_blocks)], 1)
    return family


class ReplicaMetrics(Collector):
    """The collector of the metrics, labelled with the names of the replicas, which are reused."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        replicas = self.scheduler.replicas if self.scheduler is not None else ()
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for replica in replicas:
                gauge.add_metric([replica.name], value(replica))
            yield gauge
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for replica in replicas:
                counter.add_metric([replica.name], value(replica))
            yield counter
        yield _cache_config(replicas)


REPLICAS = ReplicaMetrics()
REGISTRY.register(REPLICAS)
