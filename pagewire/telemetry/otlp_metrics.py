"""Metrics by OTLP: the metrics of the process for Prometheus, sent every minute (OTEL_METRIC_EXPORT_INTERVAL).

There is one registry for both, so nothing is measured twice and the values agree.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import REGISTRY
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from pagewire.errors import StartupError
from pagewire.telemetry import otlp, semconv
from pagewire.telemetry.otlp_delivery import Delivery
from pagewire.version import __version__

_STARTED_NS = time.time_ns()
_CUMULATIVE = AggregationTemporality.CUMULATIVE
# Names of the conventions, by their form in Prometheus; other names only lose the colon.
_NAMES = {
    "gen_ai_server_request_duration_seconds": semconv.SERVER_REQUEST_DURATION,
    "gen_ai_server_time_to_first_token_seconds": semconv.SERVER_TIME_TO_FIRST_TOKEN,
    "gen_ai_server_time_per_output_token_seconds": semconv.SERVER_TIME_PER_OUTPUT_TOKEN,
    "gen_ai_client_operation_duration_seconds": semconv.CLIENT_OPERATION_DURATION,
    "gen_ai_client_token_usage": semconv.CLIENT_TOKEN_USAGE,
}
_ATTRIBUTES = {
    name.replace(".", "_"): name
    for name in (
        semconv.OPERATION_NAME,
        semconv.PROVIDER_NAME,
        semconv.REQUEST_MODEL,
        semconv.RESPONSE_MODEL,
        semconv.TOKEN_TYPE,
        semconv.ERROR_TYPE,
    )
}
_UNITS = {"_seconds": "s", "_bytes": "By", "_tokens": "{token}", "_token_usage": "{token}"}


def _interval(environ: Mapping[str, str]) -> float:
    """Returns the seconds for the milliseconds in the variable. Raises StartupError."""
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL") or "60000"
    if not text.isdecimal() or not int(text):
        raise StartupError(f"OTEL_METRIC_EXPORT_INTERVAL={text}: expected milliseconds, for instance 60000")
    return int(text) / 1000


class Push:
    """Sends metrics from its own thread until `close`."""

    def __init__(self, service: str, target: otlp.Target, environ: Mapping[str, str] = os.environ) -> None:
        """Raises StartupError for an invalid interval."""
        self._exporter = _exporter(target)
        self._delivery = Delivery("metrics", target.endpoint)
        self._resource = otlp.resource(service)
        self._interval = _interval(environ)
        self._ended = threading.Event()
        self._is_shut_down = False
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends the metrics a last time, unless delivery is failing."""
        self._ended.set()
        if self._delivery.is_failing:
            self._shut_down()  # ends the attempts
        self._thread.join(timeout=10)
        self._shut_down()

    def _shut_down(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(self._interval)
            if not (is_last and self._delivery.is_failing):
                self._delivery.send(lambda: self._exporter.export(self._data()), MetricExportResult.SUCCESS)

    def _data(self) -> MetricsData:
        scope = InstrumentationScope("pagewire", __version__)
        metrics = list(converted(REGISTRY.collect(), time.time_ns()))
        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(scope, metrics, "")], "")])


def _exporter(target: otlp.Target) -> MetricExporter:
    if target.protocol == otlp.HTTP:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return HttpExporter(endpoint=target.endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

    return GrpcExporter(endpoint=target.endpoint, insecure=target.insecure)


def converted(families: Iterable[Family], now_ns: int) -> Iterator[Metric]:
    """Yields the metrics of Pagewire; agents have better metrics of Python and the process than the library."""
    for family in families:
        if family.name.startswith(("python_", "process_")):
            continue
        name = _NAMES.get(family.name, family.name.replace(":", "."))
        unit = next((unit for ending, unit in _UNITS.items() if family.name.endswith(ending)), "1")
        data: Sum | Gauge | Histogram
        if family.type == "counter":
            counts = [one for one in family.samples if one.name.endswith("_total")]
            data = Sum([_number(one, now_ns) for one in counts], _CUMULATIVE, is_monotonic=True)
        elif family.type == "gauge":
            data = Gauge([_number(one, now_ns) for one in family.samples])
        elif family.type == "histogram":
            data = Histogram(list(_histograms(family.samples, now_ns)), _CUMULATIVE)
        else:
            continue
        if data.data_points:
            yield Metric(name, family.documentation, unit, data)


def _number(sample: Sample, now_ns: int) -> NumberDataPoint:
    return NumberDataPoint(_attributes(sample.labels), _STARTED_NS, now_ns, sample.value)


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {_ATTRIBUTES.get(name, name): value for name, value in labels.items() if value and name != "le"}


def _histograms(samples: Iterable[Sample], now_ns: int) -> Iterator[HistogramDataPoint]:
    """Yields a histogram for each set of labels. Prometheus counts values below a bound, OTLP those between two
    bounds."""
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        groups.setdefault(key, []).append(sample)
    for group in groups.values():
        buckets = [one for one in group if one.name.endswith("_bucket")]
        below = [round(one.value) for one in buckets]
        total = next((one.value for one in group if one.name.endswith("_sum")), 0.0)
        yield HistogramDataPoint(
            _attributes(group[0].labels),
            _STARTED_NS,
            now_ns,
            below[-1],
            total,
            [count - before for count, before in zip(below, [0, *below], strict=False)],
            [float(one.labels["le"]) for one in buckets[:-1]],
            None,  # type: ignore[arg-type]  # minimum and maximum are not recorded
            None,  # type: ignore[arg-type]
            [_exemplar(one) for one in buckets if one.exemplar],
        )


def _exemplar(sample: Sample) -> Exemplar:
    exemplar = sample.exemplar
    assert exemplar is not None
    at_ns = round(float(exemplar.timestamp or time.time()) * 1e9)
    span_id, trace_id = (int(exemplar.labels[name], 16) for name in ("span_id", "trace_id"))
    return Exemplar({}, exemplar.value, at_ns, span_id, trace_id)
