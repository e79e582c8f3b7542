"""An endpoint of OTLP that is down, and comes back: what the log and the metrics say."""

import logging
from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import REGISTRY

from pagewire.telemetry import otlp
from pagewire.telemetry.otlp_delivery import DeliveredSpans, Delivery
from tests.e2e.line import free_port


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Yields the lines that a service would log."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    found: list[str] = []
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield found
    root.removeHandler(handler)
    root.setLevel(level)


def failures(signal: str) -> float:
    return REGISTRY.get_sample_value("pagewire:otlp_export_failures_total", {"signal": signal}) or 0.0


def test_the_log_reports_when_it_begins_to_fail_and_when_it_is_back(lines: list[str]) -> None:
    delivery, library = Delivery("metrics", "http://collector:4317"), logging.getLogger("opentelemetry.exporter.otlp")
    before = failures("metrics")

    def refused() -> bool:
        library.warning("Transient error, retrying in 1.05s")
        library.error("connection refused")
        return False

    def broken() -> bool:
        raise ValueError("no such thing")

    assert delivery.send(lambda: True, True) and not lines
    for attempt in (refused, broken, refused):
        assert not delivery.send(attempt, True)
        assert delivery.is_failing
    [line] = lines
    assert "metrics cannot be sent to http://collector:4317" in line and line.endswith("Transient error")
    assert delivery.send(lambda: True, True) and delivery.send(lambda: True, True)
    [_, line] = lines
    assert "metrics are sent to http://collector:4317 again" in line and "3 batches that failed" in line
    assert failures("metrics") - before == 3
    library.warning("what is no attempt")
    assert lines[2:] == ["what is no attempt"]


def test_two_signals_that_fail_the_same_way_both_say_why(lines: list[str]) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    for _ in range(2):
        exporter = GrpcExporter(endpoint=endpoint, insecure=True, timeout=0.5)
        DeliveredSpans(exporter, otlp.Target(endpoint, otlp.GRPC)).export([])
    assert len(lines) == 2 and all("UNAVAILABLE" in line for line in lines)


@pytest.mark.parametrize("exporter", [GrpcExporter, HttpExporter])
def test_real_exporters_say_why_once(exporter: type[SpanExporter], lines: list[str]) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    spans = DeliveredSpans(exporter(endpoint=endpoint, timeout=0.5), otlp.Target(endpoint, otlp.GRPC))  # type: ignore[call-arg]
    for _ in range(2):
        assert spans.export([]) == SpanExportResult.FAILURE
    [line] = lines
    assert endpoint in line and "Failed to export" in line
    spans.give_up()
    assert spans.export([]) == SpanExportResult.FAILURE, "the end of the service does not wait for it"
    spans.shutdown()
    assert lines == [line]
