"""One trace per request across the services, structured logs with request ids, all metrics in one scrape."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.line import Line, free_port, http_client, running_line

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver: (service name, span) of everything exported."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            self.spans += [(names[0], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_one_trace_and_json_logs(tmp_path: Path, quick_model: Path) -> None:
    port = free_port()
    flags = ["--otlp-traces-endpoint", f"http://127.0.0.1:{port}", "--log-format", "json"]
    names = ("gateway", "tokenizer", "scheduler", "executor")
    with running_line(tmp_path, str(quick_model), **dict.fromkeys(names, flags)) as line:
        spans = asyncio.run(traced_request(line, port))
    by_id = {span.span_id.hex(): (service, span) for service, span in spans}
    parents = {
        (service, by_id[parent][0] if (parent := span.parent_span_id.hex()) in by_id else parent)
        for service, span in spans
    }
    pagewire = {name: f"pagewire-{name}" for name in names}
    assert (pagewire["gateway"], PARENT_ID) in parents
    assert (pagewire["tokenizer"], pagewire["gateway"]) in parents
    assert (pagewire["scheduler"], pagewire["tokenizer"]) in parents
    assert (pagewire["executor"], pagewire["scheduler"]) in parents
    assert {parent for _, parent in parents} <= {PARENT_ID, *pagewire.values()}
    assert {span.trace_state for _, span in spans} == {"vendor=1"}
    server = trace_pb2.Span.SPAN_KIND_SERVER
    assert {service for service, span in spans if span.kind == server} == set(pagewire.values())
    stages = {"encode", "detokenize", "queue", "prefill", "prefill chunk", "decode"}
    assert {span.name for _, span in spans} == {
        "POST /v1/completions",
        "text_completion m",
        "generate",
        "execute",
        *stages,
    }
    gateway = next(span for service, span in spans if service == "pagewire-gateway")
    attributes = {a.key: a.value for a in gateway.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5

    logged = [json.loads(row) for row in line.log("gateway").splitlines() if row.startswith("{")]
    assert any((row.get("request_id"), row.get("trace_id")) == ("my-request", TRACE_ID) for row in logged)


async def traced_request(line: Line, port: int) -> list[tuple[str, trace_pb2.Span]]:
    """Sends one request with a client's trace context and waits for the spans of all four services."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    body = {"model": "m", "prompt": "One, two,", "max_tokens": 5, "ignore_eos": True}
    trace = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
    headers = trace | {"X-Request-Id": "my-request"}
    async with http_client(timeout=60) as http:
        response = await http.post(f"{line.base_url}/v1/completions", json=body, headers=headers)
    assert response.status_code == 200

    def ours() -> list[tuple[str, trace_pb2.Span]]:
        return [(service, span) for service, span in collector.spans if span.trace_id.hex() == TRACE_ID]

    for _ in range(200):
        if len({service for service, _ in ours()}) == 4:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    await server.stop(None)
    return ours()


async def test_one_scrape_shows_every_service(quick_line: Line) -> None:
    line = quick_line
    async with line.openai() as client:
        await client.completions.create(model="m", prompt="Hello", max_tokens=3)
    async with http_client() as http:
        text = (await http.get(f"{line.base_url}/metrics")).text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    services = {sample.labels["service"] for family in families for sample in family.samples}
    assert services == {"gateway", "tokenizer", "scheduler", "executor"}
    assert {"pagewire:num_requests_running", "pagewire:kv_cache_usage_perc", "pagewire:generation_tokens"} <= set(names)


async def test_where_a_requests_time_went(quick_line: Line) -> None:
    line = quick_line
    body = {"model": "m", "prompt": "One, two,", "max_tokens": 5, "ignore_eos": True, "n": 2}
    async with http_client(base_url=line.base_url, timeout=60) as http:
        answer = (await http.post("/v1/completions", json=body, headers={"X-Request-Id": "ask-me"})).json()
        response = await http.get(f"/v1/requests/{answer['id']}/explain")
        text = (await http.get("/v1/requests/ask-me/explain", headers={"accept": "text/plain"})).text
        unknown = await http.get("/v1/requests/unknown/explain")
    reported = response.json()
    assert [one["id"] for one in reported["outputs"]] == ["ask-me-0", "ask-me-1"]
    for output in reported["outputs"]:
        names = [phase["name"] for phase in output["phases"]]
        assert [names[0], names[1], names[-1]] == ["gateway", "tokenize", "between services"]
        assert {"queue", "prefill", "decode"} <= set(names)
        assert sum(phase["seconds"] for phase in output["phases"]) == pytest.approx(output["seconds"], rel=0.01)
        assert sum(phase["share"] for phase in output["phases"]) == pytest.approx(1, rel=0.01)
        assert output["output_tokens"] == 5 and output["finish_reason"] == "length"
        assert 0 < output["first_token_seconds"] < output["seconds"] == reported["seconds"]
        assert 0 < output["detokenize_seconds"] < output["seconds"]
    assert text == reported["text"] and "prefill" in text
    assert not reported["is_running"] and reported["silent"] == []
    assert unknown.status_code == 404 and "no service has an account" in unknown.json()["error"]["message"]


async def test_where_a_requests_time_goes_that_has_not_ended(quick_line: Line) -> None:
    line = quick_line
    body = {"model": "m", "prompt": "One, two,", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": "not-ended"}
    async with http_client(base_url=line.base_url, timeout=60) as http:
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            chunks = response.aiter_raw()
            await anext(chunks)
            reported = (await http.get("/v1/requests/not-ended/explain")).json()
        assert reported["is_running"] and "so far" in reported["text"] and "not ended" in reported["text"]
        [output] = reported["outputs"]
        assert output["phases"][-2]["name"] == "decode" and output["finish_reason"] is None
        assert 0 < output["output_tokens"] < 400
        assert sum(phase["seconds"] for phase in output["phases"]) == pytest.approx(output["seconds"], rel=0.01)
        for _ in range(100):  # its client has gone
            reported = (await http.get("/v1/requests/not-ended/explain")).json()
            if not reported["is_running"]:
                break
            await asyncio.sleep(0.05)
        assert reported["outputs"][0]["finish_reason"] == "abort"
