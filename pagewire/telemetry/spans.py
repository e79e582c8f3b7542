"""Spans, made by hand when their time is over: some per request, never one per token.

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
    """Makes all further spans of this process ones of this tracer."""
    global _tracer
    _tracer = tracer


def tracing() -> bool:
    """Returns whether spans are exported; callers skip collecting attributes otherwise."""
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
        from pagewire.telemetry import otlp_spans

        self._span, self.trace = otlp_spans.start(_tracer, name, trace, serves=serves, start_ns=_epoch_ns(start))

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
            from pagewire.telemetry import otlp_spans

            assert _tracer is not None
            now, now_ns = time.monotonic(), time.time_ns()
            interval_ns = now_ns - round((now - start) * 1e9), now_ns - round((now - end) * 1e9)
            otlp_spans.child(_tracer, self._span, name, interval_ns, attributes)

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
        from pagewire.telemetry import otlp_spans

        otlp_spans.end(self._span, attributes, error, _epoch_ns(at))
        self._span = None


def _epoch_ns(monotonic: float | None) -> int | None:
    return None if monotonic is None else time.time_ns() - round((time.monotonic() - monotonic) * 1e9)
