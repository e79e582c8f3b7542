"""Starts and stops the telemetry of a service process: logs, spans and metrics by OTLP.

A log record carries the id of its request where one is known: `logger.info("...", extra={"request_id": rid})`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pagewire.config import ServiceConfig
from pagewire.telemetry import logs, spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from pagewire.telemetry.otlp_metrics import Push

_provider: TracerProvider | None = None
_push: Push | None = None


def setup(service: str, config: ServiceConfig) -> None:
    """Starts logging to stderr, and the export of traces and metrics by OTLP where endpoints are configured.

    Call it once per process, before anything else. Raises StartupError for a protocol that is not supported.
    """
    logs.setup(service, config)
    if config.otlp_traces_endpoint or any(name.startswith("OTEL_EXPORTER_OTLP") for name in os.environ):
        _setup_otlp(service, config.otlp_traces_endpoint)


def _setup_otlp(service: str, endpoint: str | None) -> None:
    global _provider, _push
    # Deferred: importing OpenTelemetry is slow, and most processes export nothing.
    from pagewire.telemetry import otlp, otlp_spans

    if (target := otlp.target("traces", endpoint)) is not None:
        _provider = otlp_spans.provider(service, target)
        spans.record_with(otlp_spans.tracer(_provider))
    if (target := otlp.target("metrics", None)) is not None:
        from pagewire.telemetry.otlp_metrics import Push

        _push = Push(service, target)


def shutdown() -> None:
    """Sends the queued spans and metrics, and stops exporting."""
    if _push is not None:
        _push.close()
    if _provider is not None:
        _provider.shutdown()
