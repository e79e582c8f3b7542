"""The metrics of the lines of a stack, as it tells them."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from pagewire.gateway.models.line import STATES, ModelLine
from pagewire.v1.admin_pb2 import ServiceMetrics


def line_metrics(lines: Iterable[ModelLine]) -> ServiceMetrics:
    registry, label = CollectorRegistry(), ["model_name"]
    state = Gauge(
        "pagewire:line_state", "1 for the state of a model, 0 for others.", [*label, "state"], registry=registry
    )
    loads = Counter("pagewire:line_loads", "How often a model was loaded or woken.", label, registry=registry)
    memory = Gauge("pagewire:line_memory_bytes", "Memory of a model while it is ready.", label, registry=registry)
    for line in lines:
        if line.told is None:
            continue
        for name in STATES.values():
            state.labels(line.name, name).set(name == line.state)
        loads.labels(line.name).inc(line.told.num_loads)
        memory.labels(line.name).set(line.told.memory_bytes)
    return ServiceMetrics(service="stack", exposition=generate_latest(registry).decode())
