"""Spans, which are created when they end: a few per request, never one per token.

The context travels as W3C's headers (`trace.py`) in metadata and messages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagewire.telemetry.trace import NO_TRACE, Trace

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OpenTelemetrySpan
    from opentelemetry.trace import Tracer

_tracer: Tracer | None = None


def record_with(tracer: Tracer) -> None:
    """Records all further spans of this process with this tracer."""
    global _tracer
    _tracer = tracer


def tracing() -> bool:
    """Returns whether spans are exported; callers skip collecting attributes otherwise."""
    return _tracer is not None


class Span:
    """One stage of one request. Make it when the stage starts; end() exports it. It costs nothing when tracing is
    off."""

    __slots__ = ("_span", "trace")

    def __init__(self, name: str, trace: Trace = NO_TRACE, *, serves: bool = False, start: float | None = None) -> None:
        """trace: that of the parent; NO_TRACE for a new trace. `self.trace` is for children.

        serves: the stage is the whole work of this service for a remote caller. start: time.monotonic() of an earlier
        start.
        """
        self._span: OpenTelemetrySpan | None = None
        self.trace = trace
        if _tracer is None:
            return
        from pagewire.telemetry import otlp_spans

        self._span, self.trace = otlp_spans.start(_tracer, name, trace, serves=serves, start_ns=_epoch_ns(start))

    @property
    def is_recorded(self) -> bool:
        """True if the span is exported: tracing is on, and the trace was sampled."""
        return self._span is not None and self._span.is_recording()

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels of an exemplar in a histogram; None if the span is not exported."""
        if not self.is_recorded:
            return None
        return {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}

    def child(self, name: str, start: float, end: float, attributes: Mapping[str, Any] | None = None) -> None:
        """Adds a finished stage within this one. start, end: by time.monotonic()."""
        if self._span is not None and self._span.is_recording():
            from pagewire.telemetry import otlp_spans

            assert _tracer is not None
            now, now_ns = time.monotonic(), time.time_ns()
            interval_ns = now_ns - round((now - start) * 1e9), now_ns - round((now - end) * 1e9)
            otlp_spans.child(_tracer, self._span, name, interval_ns, attributes)

    def event(self, name: str, at: float | None = None, attributes: Mapping[str, Any] | None = None) -> None:
        """Adds an event. at: time.monotonic() of an earlier event."""
        if self._span is not None:
            self._span.add_event(name, attributes, _epoch_ns(at))

    def rename(self, name: str) -> None:
        """Renames the span, when more is known."""
        if self._span is not None:
            self._span.update_name(name)

    def end(
        self, attributes: Mapping[str, Any] | None = None, *, error: str | None = None, at: float | None = None
    ) -> None:
        """Ends the span. attributes: None values are left out. error: the message of a failure of this service. at: by
        time.monotonic(), if it was earlier."""
        if self._span is None:
            return
        from pagewire.telemetry import otlp_spans

        otlp_spans.end(self._span, attributes, error, _epoch_ns(at))
        self._span = None


def _epoch_ns(monotonic: float | None) -> int | None:
    return None if monotonic is None else time.time_ns() - round((time.monotonic() - monotonic) * 1e9)
