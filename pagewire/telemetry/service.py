"""Logs, metrics and traces, the same for every service.

Log records carry `request_id` where one is known: `logger.info("...", extra={"request_id": rid})`. Metrics are
prometheus_client's, on its default registry. Spans are made by hand when their time is over, per request and never
per token; the context travels as W3C's headers (`trace.py`) in metadata and messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import REGISTRY, Gauge, Metric, disable_created_metrics, start_http_server
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest

from pagewire.config import ListenConfig, ServiceConfig
from pagewire.errors import StartupError
from pagewire.telemetry import logs
from pagewire.telemetry.trace import NO_TRACE, Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OpenTelemetrySpan
    from opentelemetry.trace import Tracer

    from pagewire.telemetry.otlp_metrics import Push

logger = logging.getLogger(__name__)

# Seconds. Fine below 100 ms, where inter-token latencies live; coarse up to minutes.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip

# Of what OpenTelemetry's conventions for GenAI measure: seconds, and labels of all of it.
GENAI_DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
GENAI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
# Tokens, of a prompt, an output or a step.
TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)

# When each series began doubles their number, and says nothing that the processes' start times do not.
disable_created_metrics()

ASYNCIO_TASKS = Gauge(
    "pagewire:asyncio_tasks", "Tasks alive on the service's event loop; grows only with live requests"
)


class Collectable(Protocol):
    def collect(self) -> Iterable[Metric]: ...


_tracer: Tracer | None = None
_provider: TracerProvider | None = None
_push: Push | None = None


def setup(service: str, config: ServiceConfig) -> None:
    """Logging to stderr; traces and metrics by OTLP where there are endpoints. Once per process, before anything else.

    Raises StartupError.
    """
    logs.setup(service, config)
    if config.otlp_traces_endpoint or any(name.startswith("OTEL_EXPORTER_OTLP") for name in os.environ):
        _setup_otlp(service, config.otlp_traces_endpoint)


def _setup_otlp(service: str, endpoint: str | None) -> None:
    global _tracer, _provider, _push
    # Here and in Span, not at the top: only those who trace pay for importing OpenTelemetry.
    from pagewire.telemetry import otlp, spans

    if (target := otlp.target("traces", endpoint)) is not None:
        _provider = spans.provider(service, target)
        _tracer = spans.tracer(_provider)
    if (target := otlp.target("metrics", None)) is not None:
        from pagewire.telemetry.otlp_metrics import Push

        _push = Push(service, target)


def shutdown() -> None:
    """Sends what is still queued."""
    if _push is not None:
        _push.close()
    if _provider is not None:
        _provider.shutdown()


def tracing() -> bool:
    """Whether spans go anywhere; callers skip collecting attributes otherwise."""
    return _tracer is not None


class Span:
    """One stage of one request. Made when it starts, exported at end(); free when tracing is off."""

    __slots__ = ("_span", "trace")

    def __init__(self, name: str, trace: Trace = NO_TRACE, *, serves: bool = False, start: float | None = None) -> None:
        """trace: of the parent; NO_TRACE for a new one. `self.trace` is for its children.

        serves: the stage is the whole of what this service does for a remote caller. start: by time.monotonic(), if it
        was earlier.
        """
        self._span: OpenTelemetrySpan | None = None
        self.trace = trace
        if _tracer is None:
            return
        from pagewire.telemetry import spans

        self._span, self.trace = spans.start(_tracer, name, trace, serves=serves, start_ns=_epoch_ns(start))

    @property
    def is_recorded(self) -> bool:
        """Whether it goes anywhere: traces are on, and this one was sampled."""
        return self._span is not None and self._span.is_recording()

    @property
    def exemplar(self) -> dict[str, str] | None:
        """For a histogram: where to look what made a value what it is; None: nowhere."""
        if not self.is_recorded:
            return None
        return {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}

    def child(self, name: str, start: float, end: float, attributes: Mapping[str, Any] | None = None) -> None:
        """A stage within, which is over. start, end: by time.monotonic()."""
        if self._span is not None and self._span.is_recording():
            from pagewire.telemetry import spans

            assert _tracer is not None
            now, now_ns = time.monotonic(), time.time_ns()
            interval_ns = now_ns - round((now - start) * 1e9), now_ns - round((now - end) * 1e9)
            spans.child(_tracer, self._span, name, interval_ns, attributes)

    def event(self, name: str, at: float | None = None, attributes: Mapping[str, Any] | None = None) -> None:
        """at: by time.monotonic(), if it was earlier."""
        if self._span is not None:
            self._span.add_event(name, attributes, _epoch_ns(at))

    def rename(self, name: str) -> None:
        """When more is known of what it is."""
        if self._span is not None:
            self._span.update_name(name)

    def end(
        self, attributes: Mapping[str, Any] | None = None, *, error: str | None = None, at: float | None = None
    ) -> None:
        """attributes: those that are None are left out. error: what failed, if that is a fault of ours. at: by
        time.monotonic(), if it was earlier."""
        if self._span is None:
            return
        from pagewire.telemetry import spans

        spans.end(self._span, attributes, error, _epoch_ns(at))
        self._span = None


def _epoch_ns(monotonic: float | None) -> int | None:
    return None if monotonic is None else time.time_ns() - round((time.monotonic() - monotonic) * 1e9)


def openmetrics(registry: Collectable) -> bytes:
    """As OpenMetrics text 1.0.0. Names stay as they are: the library's default makes colons underscores."""
    return generate_latest(registry, ALLOWUTF8)


def exposition() -> str:
    """This process's metrics as OpenMetrics text. Called on the event loop."""
    ASYNCIO_TASKS.set(len(asyncio.all_tasks()))
    return openmetrics(REGISTRY).decode()


def serve_metrics(config: ListenConfig) -> None:
    """Serves this process's metrics over HTTP in a thread of its own, if a port was asked for. Raises StartupError."""
    if config.metrics_port is None:
        return
    try:
        start_http_server(config.metrics_port, config.admin_host)
    except OSError as error:
        raise StartupError(
            f"--metrics-port: cannot listen on {config.admin_host}:{config.metrics_port} ({error.strerror or error}):"
            " stop what is using it, or choose another with --metrics-port and --admin-host"
        ) from error
    logger.info("metrics on http://%s:%d/metrics", config.admin_host, config.metrics_port)
