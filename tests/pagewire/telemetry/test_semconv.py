"""Names are those of OpenTelemetry's package, and spans and metrics go where its variables say."""

import importlib
import pkgutil

import opentelemetry.semconv._incubating.attributes as incubating
import opentelemetry.semconv.attributes as stable
import pytest
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from pagewire.errors import StartupError
from pagewire.telemetry import otlp, semconv
from pagewire.telemetry.trace import Trace
from pagewire.v1.common_pb2 import RequestContext

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def values(module: object) -> set[str]:
    return {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


def test_names_are_those_of_the_package() -> None:
    known = values(gen_ai_metrics)
    for package in (incubating, stable):
        for module in pkgutil.iter_modules(package.__path__):
            known |= values(importlib.import_module(f"{package.__name__}.{module.name}"))
    ours = {value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str)}
    ours |= set(semconv.REQUEST_SAMPLING.values())
    assert ours - known == {semconv.PROVIDER}
    deprecated = {"gen_ai.system", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"}
    assert not ours & deprecated


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (None, {}, None),
        ("localhost:4317", {}, ("localhost:4317", "grpc")),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, ("http://c:4317", "grpc")),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            ("http://c:4318/v1/traces", "http/protobuf"),
        ),
        (
            "http://mine:4318",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            ("http://mine:4318/v1/traces", "http/protobuf"),
        ),
        (
            None,
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/own", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            ("http://t/own", "http/protobuf"),
        ),
        (None, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m"}, None),
        ("localhost:4317", {"OTEL_SDK_DISABLED": "true"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_variables_say_where_traces_go(given, environ, expected) -> None:
    assert otlp.target("traces", given, environ) == expected


def test_a_protocol_that_is_not_spoken_is_refused() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    with pytest.raises(StartupError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL=http/json.*http/protobuf"):
        otlp.target("traces", None, environ)


def test_variables_set_the_attributes_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    assert otlp.resource("gateway").attributes["service.name"] == "pagewire-gateway"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.namespace=mine")
    reported = otlp.resource("gateway").attributes
    assert (reported["deployment.environment.name"], reported["service.namespace"]) == ("test", "mine")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    reported = otlp.resource("gateway").attributes
    assert (reported["service.name"], reported["pagewire.service"]) == ("chat", "gateway")


def test_what_clients_send_travels_if_it_is_valid() -> None:
    headers = [(b"traceparent", TRACEPARENT.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    trace = Trace.of_client([*headers, (b"baggage", b"user=me"), (b"host", b"x")])
    assert trace == (TRACEPARENT, "a=1,b=2", "user=me")
    assert Trace.of(trace.attach_to(RequestContext())) == trace
    assert Trace.of_client(trace.metadata) == trace
    assert (trace.trace_id, trace.span_id) == ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
    assert Trace.of_client([("traceparent", "nonsense"), ("tracestate", "a=1")]) == ("", "", "")
    assert Trace.of_client([*headers, (b"traceparent", b"again")]) == ("", "", ""), "which of them?"
    assert Trace.of_client([("baggage", "a" * 9000)]).baggage == ""
