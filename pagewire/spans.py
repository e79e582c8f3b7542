"""OpenTelemetry's side of `telemetry.Span`; imported only if spans are exported."""

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagewire import __version__

_PROPAGATOR = TraceContextTextMapPropagator()


def provider(service: str, endpoint: str) -> TracerProvider:
    """Sends spans to an OTLP endpoint, host:port or a URL, over gRPC."""
    result = TracerProvider(
        resource=Resource.create({"service.name": f"pagewire-{service}", "service.version": __version__})
    )
    # The exporter takes an address without a scheme for one with TLS unless it is told.
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    result.add_span_processor(BatchSpanProcessor(exporter))
    return result


def tracer(provider: TracerProvider) -> trace.Tracer:
    return provider.get_tracer("pagewire", __version__)


def start(tracer: trace.Tracer, name: str, traceparent: str, *, serves: bool) -> tuple[trace.Span, str]:
    """A span and its W3C context. traceparent: the parent's, "" for a new trace."""
    parent = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
    span = tracer.start_span(name, context=parent, kind=SpanKind.SERVER if serves else SpanKind.INTERNAL)
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return span, carrier.get("traceparent", "")


def end(span: trace.Span, attributes: Mapping[str, Any] | None, error: str | None) -> None:
    if attributes:
        span.set_attributes(attributes)
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end()
