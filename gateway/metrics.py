"""The gateway's own metrics, and one exposition of the metrics of all services."""

import logging
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagewire.telemetry import LATENCY_BUCKETS
from pagewire.v1.admin_pb2 import ServiceMetrics

logger = logging.getLogger(__name__)

HTTP_REQUESTS = Counter("pagewire:http_requests", "HTTP responses sent.", ["method", "route", "status"])
HTTP_DURATION = Histogram(
    "pagewire:http_request_duration_seconds",
    "From the request's head to the response's last byte.",
    ["method", "route"],
    buckets=LATENCY_BUCKETS,
)
HTTP_IN_FLIGHT = Gauge("pagewire:http_requests_in_flight", "HTTP requests being answered.")
TIME_TO_FIRST_TOKEN = Histogram(
    "pagewire:gateway_time_to_first_token_seconds",
    "From the request's head to the first output of a generation, as the gateway sees it; streamed responses only.",
    ["operation"],
    buckets=LATENCY_BUCKETS,
)
E2E_LATENCY = Histogram(
    "pagewire:gateway_e2e_request_latency_seconds",
    "From the request's head to the end of a successful generation, or to its vectors, as the gateway sees it.",
    ["operation"],
    buckets=LATENCY_BUCKETS,
)
RESUBMISSIONS = Counter(
    "pagewire:gateway_resubmitted_requests", "Requests submitted again after the stream to the tokenizer broke."
)
CLIENTS_GONE = Counter("pagewire:gateway_clients_gone", "Responses whose client went away before their end.")
HTTP_CONNECTIONS = Gauge(
    "pagewire:http_connections",
    "Open HTTP connections: idle, sending a head or a body, or waiting for an answer.",
    ["phase"],
)
HTTP_CONNECTION_LIMIT = Gauge("pagewire:http_connection_limit", "HTTP connections that this process takes.")
HTTP_CONNECTIONS_CLOSED = Counter(
    "pagewire:http_connections_closed",
    "HTTP connections closed by the gateway: refused or to make room, for being late, or for what is not HTTP.",
    ["reason"],
)


@dataclass(frozen=True)
class _Families:
    """What generate_latest takes for a registry."""

    families: Iterable[Metric]

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


def merge(services: Iterable[ServiceMetrics]) -> bytes:
    """Every service's metrics in Prometheus text format 0.0.4: one family per name, its samples told apart by the
    label `service` and, where there are several of a service, by `address`."""
    services = list(services)
    counts = Counts(service.service for service in services)
    families: dict[str, Metric] = {}
    for service in services:
        own = {"service": service.service}
        if counts[service.service] > 1:
            own["address"] = service.address
        for family in text_string_to_metric_families(service.exposition):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if merged.type != family.type:
                logger.warning(
                    "metric %s is a %s here and a %s at the %s: left out",
                    family.name, merged.type, family.type, service.service,
                )  # fmt: skip
                continue
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, **own}))
    return generate_latest(_Families(families.values()))
