"""The OpenTelemetry side of `spans.Span`; imported only if spans are exported."""

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagewire.telemetry import otlp
from pagewire.telemetry.otlp_delivery import DeliveredSpans, SpanBatches
from pagewire.telemetry.trace import Trace
from pagewire.version import __version__

_PROPAGATOR = TraceContextTextMapPropagator()


def provider(service: str, target: otlp.Target) -> TracerProvider:
    """Returns a provider that sends spans to an OTLP endpoint. OTEL_TRACES_SAMPLER and OTEL_BSP_* apply."""
    result = TracerProvider(resource=otlp.resource(service))
    result.add_span_processor(SpanBatches(DeliveredSpans(_exporter(target), target)))
    return result


def _exporter(target: otlp.Target) -> SpanExporter:
    if target.protocol == otlp.HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=target.endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=target.endpoint, insecure=target.insecure)


def tracer(provider: TracerProvider) -> trace.Tracer:
    return provider.get_tracer("pagewire", __version__)


def start(
    tracer: trace.Tracer, name: str, parent: Trace, *, serves: bool, start_ns: int | None
) -> tuple[trace.Span, Trace]:
    """Starts a span, and returns it with the trace for its children. start_ns: since the epoch; None: now."""
    context = None
    if parent.traceparent:
        context = _PROPAGATOR.extract({"traceparent": parent.traceparent, "tracestate": parent.tracestate})
    kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
    span = tracer.start_span(name, context=context, kind=kind, start_time=start_ns)
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return span, Trace(carrier.get("traceparent", ""), carrier.get("tracestate", ""), parent.baggage)


def child(
    tracer: trace.Tracer,
    parent: trace.Span,
    name: str,
    interval_ns: tuple[int, int],
    attributes: Mapping[str, Any] | None,
) -> None:
    """Exports a finished span below a parent of this process."""
    said = None if attributes is None else {name: value for name, value in attributes.items() if value is not None}
    start_ns, end_ns = interval_ns
    span = tracer.start_span(name, trace.set_span_in_context(parent), attributes=said, start_time=start_ns)
    span.end(end_ns)


def end(span: trace.Span, attributes: Mapping[str, Any] | None, error: str | None, end_ns: int | None) -> None:
    if attributes:
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(end_ns)
