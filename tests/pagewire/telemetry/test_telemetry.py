"""Spans arrive at the endpoint, however it is written."""

import gzip
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

REPOSITORY = Path(__file__).parents[3]

# Tracing is set up once per process, so each endpoint gets a process of its own.
EXPORT = """
import sys
from pagewire.telemetry import setup as telemetry
from pagewire.telemetry.spans import Span
from pagewire.config import GatewayConfig
telemetry.setup("gateway", GatewayConfig(otlp_traces_endpoint=sys.argv[1]))
Span("hello").end()
telemetry.shutdown()
"""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        self.names += [span.name for scope in scopes for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, int]]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, port
    server.stop(None).wait()


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_plain_endpoints(collector: tuple[Collector, int], scheme: str) -> None:
    received, port = collector
    subprocess.run([sys.executable, "-c", EXPORT, f"{scheme}127.0.0.1:{port}"], cwd=REPOSITORY, check=True, timeout=60)
    assert received.names == ["hello"]


# A client's trace is continued, and measurements name the trace to look at.
EXPORT_BY_VARIABLES = """
from prometheus_client import Histogram
from pagewire.telemetry import metrics, setup as telemetry
from pagewire.telemetry.spans import Span
from pagewire.config import GatewayConfig
from pagewire.telemetry.trace import Trace
telemetry.setup("gateway", GatewayConfig())
trace = Trace("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1", "")
span = Span("hello", trace, serves=True)
labels = ["gen_ai_operation_name", "error_type"]
duration = Histogram("gen_ai_server_request_duration_seconds", "Seconds.", labels, buckets=(0.1, 1))
for seconds in (0.5, 2):
    duration.labels("chat", "").observe(seconds, span.exemplar)
span.end({"gen_ai.operation.name": "chat", "error.type": None})
telemetry.shutdown()
"""


class HttpCollector(BaseHTTPRequestHandler):
    """OTLP over HTTP; what it got is the server's."""

    def do_POST(self) -> None:
        assert isinstance(self.server, HttpServer)
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        message: Any = MESSAGES[self.path]()
        message.ParseFromString(body)
        self.server.received[self.path] = message
        self.server.keys.append(self.headers.get("api-key"))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class HttpServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HttpCollector)
        self.received: dict[str, Any] = {}
        self.keys: list[str | None] = []


MESSAGES = {
    "/v1/traces": trace_service_pb2.ExportTraceServiceRequest,
    "/v1/metrics": metrics_service_pb2.ExportMetricsServiceRequest,
}


def test_variables_alone_start_traces_and_metrics_over_http() -> None:
    with HttpServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
            "OTEL_SERVICE_NAME": "chat",
        }
        command = [sys.executable, "-c", EXPORT_BY_VARIABLES]
        subprocess.run(command, cwd=REPOSITORY, check=True, timeout=60, env={**os.environ, **environment})
        server.shutdown()
        thread.join()
    assert set(server.keys) == {"secret"}
    [of_spans] = server.received["/v1/traces"].resource_spans
    resource = {one.key: one.value.string_value for one in of_spans.resource.attributes}
    assert (resource["service.name"], resource["pagewire.service"]) == ("chat", "gateway")
    [span] = of_spans.scope_spans[0].spans
    assert span.trace_id.hex() == "4bf92f3577b34da6a3ce929d0e0e4736" and span.trace_state == "vendor=1"
    assert span.kind == span.SPAN_KIND_SERVER and [one.key for one in span.attributes] == ["gen_ai.operation.name"]
    [of_metrics] = server.received["/v1/metrics"].resource_metrics
    metrics = {one.name: one for one in of_metrics.scope_metrics[0].metrics}
    duration = metrics["gen_ai.server.request.duration"]
    [point] = duration.histogram.data_points
    assert duration.unit == "s" and [one.key for one in point.attributes] == ["gen_ai.operation.name"]
    assert (point.count, point.sum) == (2, 2.5) and not point.HasField("max")
    assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([0, 1, 1], [0.1, 1])
    assert {one.trace_id for one in point.exemplars} == {span.trace_id}
    assert "pagewire.asyncio_tasks" in metrics


def test_https_is_spoken_with_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        endpoint = f"https://127.0.0.1:{server.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", EXPORT, endpoint], cwd=REPOSITORY) as process:
            try:
                connection, _ = server.accept()
                with connection:
                    assert connection.recv(1) == b"\x16", "the first byte of a TLS handshake"
            finally:
                process.kill()
