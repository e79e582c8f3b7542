"""Metrics of all services in one exposition, in the text format of Prometheus or as OpenMetrics."""

import logging
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Metric, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pagewire.gateway.exposition.vllm_names import vllm_families
from pagewire.telemetry import openmetrics
from pagewire.v1.admin_pb2 import ServiceMetrics

logger = logging.getLogger(__name__)

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text"
# What the client library says of a process itself, which no model changes.
_OF_PROCESSES = ("process_", "python_")


class Exposition(NamedTuple):
    content: bytes
    content_type: str


@dataclass(frozen=True)
class _Families:
    """What generate_latest takes for a registry."""

    families: Iterable[Metric]

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


def expose(services: Iterable[ServiceMetrics], accept: str, model_name: str, *, with_vllm_names: bool) -> Exposition:
    """One family per name, its samples told apart by the label `service` and, where there are several of a service, by
    `address`.

    accept: the scraper's header; who knows OpenMetrics gets it, with exemplars. model_name: a label of all samples but
    those of processes; "" if nobody knows it yet.
    """
    families = merge(services, model_name)
    if with_vllm_names:
        families += vllm_families(families)
    if _OPENMETRICS in accept:
        return Exposition(openmetrics(_Families(families)), CONTENT_TYPE_LATEST)
    return Exposition(generate_latest(_Families(families)), _TEXT)


def merge(services: Iterable[ServiceMetrics], model_name: str) -> list[Metric]:
    services = list(services)
    counts = Counts(service.service for service in services)
    families: dict[str, Metric] = {}
    for service in services:
        own = {"service": service.service}
        if counts[service.service] > 1:
            own["address"] = service.address
        for family in _parse(service.exposition):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if merged.type != family.type:
                logger.warning(
                    "metric %s is a %s here and a %s at the %s: left out",
                    family.name, merged.type, family.type, service.service,
                )  # fmt: skip
                continue
            labels = own if family.name.startswith(_OF_PROCESSES) else {**own, "model_name": model_name}
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, **labels}))
    return list(families.values())


def _parse(exposition: str) -> Iterable[Metric]:
    """Services tell of OpenMetrics; one that has not been replaced yet may have the older format."""
    return (parse_openmetrics if exposition.endswith("# EOF\n") else parse_text)(exposition)
