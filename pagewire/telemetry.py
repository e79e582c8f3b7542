"""Logs, metrics and traces, the same for every service.

Log records carry `request_id` where one is known: `logger.info("...", extra={"request_id": rid})`. Metrics are
prometheus_client's, on its default registry. Spans are made by hand when their time is over, per request and never
per token; the context travels as a W3C traceparent string in metadata and messages.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import REGISTRY, Gauge, generate_latest, start_http_server

from pagewire import __version__, logs
from pagewire.config import ServiceConfig

logger = logging.getLogger(__name__)

# Seconds. Fine below 100 ms, where inter-token latencies live; coarse up to minutes.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip

ASYNCIO_TASKS = Gauge(
    "pagewire:asyncio_tasks", "Tasks alive on the service's event loop; grows only with live requests"
)

_PROPAGATOR = TraceContextTextMapPropagator()
_tracer: trace.Tracer | None = None
_provider: TracerProvider | None = None


def setup(service: str, config: ServiceConfig) -> None:
    """Logging to stderr, and tracing if there is an endpoint. Once per process, before anything else."""
    logs.setup(service, config)
    if config.otlp_traces_endpoint:
        _setup_tracing(service, config.otlp_traces_endpoint)


def _setup_tracing(service: str, endpoint: str) -> None:
    global _tracer, _provider
    # The exporter pulls in its own gRPC machinery: only those who trace pay for the import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    resource = Resource.create({"service.name": f"pagewire-{service}", "service.version": __version__})
    _provider = TracerProvider(resource=resource)
    # The exporter takes an address without a scheme for one with TLS unless it is told.
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    _provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = _provider.get_tracer("pagewire", __version__)


def shutdown() -> None:
    """Sends the spans that are still queued."""
    if _provider is not None:
        _provider.shutdown()


def tracing() -> bool:
    """Whether spans go anywhere; callers skip collecting attributes otherwise."""
    return _tracer is not None


class Span:
    """One stage of one request. Made when it starts, exported at end(); free when tracing is off."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, name: str, traceparent: str = "", *, kind: SpanKind = SpanKind.INTERNAL) -> None:
        """traceparent: the parent's W3C context, "" for a new trace. `self.traceparent` is handed on to children."""
        self._span: trace.Span | None = None
        self.traceparent = traceparent
        if _tracer is None:
            return
        parent = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
        self._span = _tracer.start_span(name, context=parent, kind=kind)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        self.traceparent = carrier.get("traceparent", "")

    def end(self, attributes: Mapping[str, Any] | None = None, *, error: str | None = None) -> None:
        if self._span is None:
            return
        if attributes:
            self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()
        self._span = None


def exposition() -> str:
    """This process's metrics in Prometheus text format. Called on the event loop."""
    ASYNCIO_TASKS.set(len(asyncio.all_tasks()))
    return generate_latest(REGISTRY).decode()


def serve_metrics(port: int | None, host: str = "0.0.0.0") -> None:
    """Serves this process's metrics over HTTP in a thread of its own, if a port was asked for."""
    if port is not None:
        start_http_server(port, host)
        logger.info("metrics on http://%s:%d/metrics", host, port)
