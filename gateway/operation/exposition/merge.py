"""Metrics of all services in one exposition, in the text format of Prometheus or as OpenMetrics."""

import logging
from collections import Counter as Counts
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from pagewire.gateway.operation.exposition.text import Family, labels_of, labels_text, parsed, quoted, written
from pagewire.gateway.operation.exposition.vllm_names import vllm_families
from pagewire.v1.admin_pb2 import ServiceMetrics
from pagewire.wire.addresses import without_directories

logger = logging.getLogger(__name__)

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text"
# Metrics of a process from the client library, which have no model.
_OF_PROCESSES = ("process_", "python_")


class Exposition(NamedTuple):
    content: bytes
    content_type: str


# The services of each model; those without one, or of several, have None. A model that is not known yet is "".
ByModel = Sequence[tuple[str | None, Sequence[ServiceMetrics]]]


def expose(by_model: ByModel, accept: str, *, with_vllm_names: bool) -> Exposition:
    """Returns the metrics of all services, one family for each name.

    The label `service` distinguishes samples, and `address` if there are several of a service of a model; `model_name`
    is a label of all samples except those of processes.

    accept: the header of the scraper; OpenMetrics, with exemplars, if it names that.
    """
    families = merge(by_model)
    if with_vllm_names:
        families += vllm_families(families)
    as_openmetrics = _OPENMETRICS in accept
    content = written(families, as_openmetrics=as_openmetrics).encode()
    return Exposition(content, CONTENT_TYPE_LATEST if as_openmetrics else _TEXT)


def merge(by_model: ByModel) -> list[Family]:
    pairs = [(model, service) for model, services in by_model for service in services]
    has_several = len({model for model, _ in pairs if model is not None}) > 1
    counts = Counts((model, service.service) for model, service in pairs)
    families: dict[str, Family] = {}
    for model, service in pairs:
        own = {"service": quoted(service.service)}
        if counts[model, service.service] > 1:
            own["address"] = quoted(without_directories(service.address))
        named = {} if model is None else {"model_name": quoted(model)}
        # Processes of several models differ by nothing else.
        of_process, of_model = _Labelled(own | named if has_several else own), _Labelled(own | named)
        for family in parsed(service.exposition):
            merged = families.setdefault(family.name, Family(family.name, family.kind, family.documentation))
            if merged.kind != family.kind:
                logger.warning(
                    "metric %s is left out: it is a %s here and a %s at the %s",
                    family.name, merged.kind, family.kind, service.service,
                )  # fmt: skip
                continue
            labelled = of_process if family.name.startswith(_OF_PROCESSES) else of_model
            merged.samples += [one._replace(labels=labelled[one.labels]) for one in family.samples]
    return list(families.values())


class _Labelled(dict[str, str]):
    """A cache: labels -> the same labels with those of a service. Many samples have the same labels."""

    def __init__(self, own: dict[str, str]) -> None:
        super().__init__()
        self._own = own

    def __missing__(self, labels: str) -> str:
        self[labels] = result = labels_text({**labels_of(labels), **self._own})
        return result
