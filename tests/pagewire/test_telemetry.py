"""Spans arrive at the endpoint, however it is written."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

REPOSITORY = Path(__file__).parents[2]

# Tracing is set up once per process, so each endpoint gets a process of its own.
EXPORT = """
import sys
from pagewire import telemetry
from pagewire.config import GatewayConfig
telemetry.setup("gateway", GatewayConfig(otlp_traces_endpoint=sys.argv[1]))
telemetry.Span("hello").end()
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
