"""Delivery of OTLP data. The log reports when delivery starts or stops failing, not every attempt."""

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import Counter

from pagewire.telemetry import otlp

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

FAILURES = Counter(
    "pagewire:otlp_export_failures",
    "Batches that could not be sent by OTLP, after all attempts: spans are lost, metrics come with the next one",
    ["signal"],
)
_EXPORTERS = logging.getLogger("opentelemetry.exporter")
_QUEUES = logging.getLogger("opentelemetry.sdk._shared_internal")
_RETRY = re.compile(r", retrying in [\d.]+s")
_sending = threading.local()  # .of: the Delivery that this thread's exporter sends for


class Delivery:
    """The delivery of one signal to one endpoint, from one thread."""

    def __init__(self, signal: str, endpoint: str) -> None:
        """signal: "traces" or "metrics"."""
        self._signal, self._endpoint = signal, endpoint
        self._failures = FAILURES.labels(signal)
        self._lost = 0  # since it began to fail
        self._failing_since = 0.0
        self.reason = ""  # the exporter's message about the current batch
        _take_over_logs()

    @property
    def is_failing(self) -> bool:
        return self._lost > 0

    def send(self, export: Callable[[], Result], ok: Result) -> Result | None:
        """Runs `export` and returns its result; None if it raised an exception. ok: the result of success."""
        _sending.of, self.reason, error, result = self, "", None, None
        try:
            result = export()
        except Exception as raised:
            error, self.reason = raised, f"{type(raised).__name__}: {raised}"
        finally:
            _sending.of = None
        if result == ok:
            self._arrived()
        else:
            self._failed(error)
        return result

    def _failed(self, error: Exception | None) -> None:
        self._failures.inc()
        self._lost += 1
        if self._lost == 1:
            self._failing_since = time.monotonic()
            logger.warning(
                "%s cannot be sent to %s%s: %s",
                self._signal, self._endpoint, " and are lost until it accepts them" if self._signal == "traces" else "",
                self.reason or "the exporter gives no reason", exc_info=error,
            )  # fmt: skip

    def _arrived(self) -> None:
        if self._lost:
            seconds = time.monotonic() - self._failing_since
            logger.info(
                "%s are sent to %s again, after %.0f s and %d batches that failed",
                self._signal, self._endpoint, seconds, self._lost,
            )  # fmt: skip
            self._lost = 0


class DeliveredSpans(SpanExporter):
    """Sends spans with another exporter, and watches their delivery."""

    def __init__(self, exporter: SpanExporter, target: otlp.Target) -> None:
        self._exporter = exporter
        self._delivery = Delivery("traces", target.endpoint)
        self._ended = False
        _QUEUES.addFilter(lambda record: not (self._delivery.is_failing and record.levelno == logging.WARNING))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._ended:
            return SpanExportResult.FAILURE
        sent = self._delivery.send(lambda: self._exporter.export(spans), SpanExportResult.SUCCESS)
        return SpanExportResult.FAILURE if sent is None else sent

    def give_up(self) -> None:
        """Skips sending the last spans if delivery is failing, because the end of the process must not wait for
        retries."""
        if self._delivery.is_failing:
            self.shutdown()

    def shutdown(self) -> None:
        if not self._ended:
            self._ended = True
            self._exporter.shutdown()


class SpanBatches(BatchSpanProcessor):
    def __init__(self, exporter: DeliveredSpans) -> None:
        super().__init__(exporter)
        self._delivered = exporter

    def shutdown(self) -> None:
        self._delivered.give_up()
        super().shutdown()


class _Reasons(logging.Handler):
    """Keeps the first record about a batch as the reason of its failure: the last one may only report the last attempt.
    Other records are logged as usual."""

    def emit(self, record: logging.LogRecord) -> None:
        delivery: Delivery | None = getattr(_sending, "of", None)
        if delivery is None or record.levelno < logging.WARNING:
            logging.getLogger().handle(record)
        else:
            delivery.reason = delivery.reason or _RETRY.sub("", record.getMessage())


def _take_over_logs() -> None:
    if _EXPORTERS.propagate:
        _EXPORTERS.addHandler(_Reasons())
        _EXPORTERS.propagate = False
    # They drop messages that repeat within 20 seconds, even of another signal.
    for name in logging.root.manager.loggerDict:
        if name.startswith(f"{_EXPORTERS.name}."):
            logging.getLogger(name).filters.clear()
