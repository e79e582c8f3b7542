"""Routes beside generation, and what operators see."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from pagewire import __version__
from pagewire.config import GatewayConfig
from pagewire.errors import StartupError
from pagewire.gateway import main
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import access_lines, eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


async def test_models(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    models = [model async for model in ai.models.list()]
    assert [model.id for model in models] == ["fake", "alias"]
    assert (models[0].object, models[0].max_model_len, models[0].root) == ("model", 1000, "fake")
    assert models[0].default_sampling_params == {"temperature": 0.2, "top_k": 20}
    assert models[0].default_sampling_source == "generation_config.json"
    fake.models.append("org/name")
    assert (await ai.models.retrieve("org/name")).id == "org/name"


async def test_lists_are_answered_with_lists(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["ab", "c"], "return_token_strs": True}
    answer = (await client.post("/v1/tokenize", json=body)).json()
    assert answer["tokens"] == [[94, 97, 98], [94, 99]] and answer["count"] == [3, 2]
    assert answer["token_strs"] == [["^", "a", "b"], ["^", "c"]]
    assert (await client.post("/v1/tokenize", json={"prompt": ["c"]})).json()["tokens"] == [[94, 99]]
    reported = (await client.post("/v1/detokenize", json={"tokens": [[97, 98], [99]]})).json()
    assert reported == {"prompt": ["ab", "c"], "text": ["ab", "c"]}
    for path, wrong in (("/v1/tokenize", {"prompt": []}), ("/v1/detokenize", {"tokens": [[97], 98]})):
        assert (await client.post(path, json=wrong)).status_code == 400


async def test_tokenize_and_detokenize(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "prompt": "é漢", "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer == {
        "count": 3, "max_model_len": 1000, "tokens": [ord("^"), ord("é"), ord("漢")], "token_strs": ["^", "é", "漢"],
    }  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False, "add_special_tokens": False}
    answer = (await client.post("/tokenize", json=chat)).json()
    assert answer["token_strs"] is None
    assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {
        "prompt": "<user>a",
        "text": "<user>a",
    }
    both = await client.post("/tokenize", json={"prompt": "p", **chat})
    assert both.status_code == 400


async def test_probes_follow_the_line(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address) as client:
        await wait_ready(client)
        await fake.set_serving(False)
        for path in ("/health", "/readyz"):
            response = await client.get(path)
            assert response.status_code == 503
            assert "not ready" in response.json()["reason"]
        assert (await client.get("/livez")).status_code == 200
        await fake.set_serving(True)
        assert (await client.get("/health")).status_code == 200
        await fake.stop()
        response = await client.get("/health")
        assert response.status_code == 503
        assert "UNAVAILABLE" in response.json()["reason"]
        assert (await client.get("/livez")).status_code == 200


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}


def test_runs_without_torch_transformers_and_the_services() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'services', 'kernels'): sys.modules[name] = None\n"
        "import pagewire.gateway.main"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


async def test_one_scrape_of_all_services(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    await client.post("/v1/completions", json={"prompt": "p", "stream": True})
    await client.get("/no/such/path")
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))

    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    shared = families["pagewire:shared"]
    assert shared.documentation == "In both.\nWith \\ and a line break."
    values = {s.labels["service"]: s.value for s in shared.samples if s.name.endswith("_total")}
    assert values == {"tokenizer": 2, "scheduler": 2}
    assert {s.labels["kind"] for s in shared.samples} == {'a"b'}
    assert families["pagewire:scheduler_seconds"].type == "histogram"
    assert all("service" in s.labels for family in families.values() for s in family.samples)
    own = {(s.labels["route"], s.labels["status"]) for s in families["pagewire:http_requests"].samples}
    assert ("/v1/completions", "200") in own
    assert ("unknown", "404") in own

    await fake.stop()
    alone = list(text_string_to_metric_families((await client.get("/metrics")).text))
    assert {s.labels["service"] for family in alone for s in family.samples} == {"gateway"}


async def test_request_id_goes_everywhere(
    client: httpx.AsyncClient, fake: FakeTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pagewire.gateway"):
        response = await client.post("/v1/completions", json={"prompt": "p"}, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "cmpl-mine"
        assert fake.received[0].request_id == "mine"

        given = await client.post("/v1/completions", json={"prompt": "p", "request_id": "in-body"})
        assert given.headers["x-request-id"] == "in-body"

        made = await client.post("/v1/completions", json={"prompt": "p"}, headers={"X-Request-Id": "two words"})
        assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
        assert "two words" not in made.headers["x-request-id"]
        await client.get("/health")
        await client.get("/metrics")
        # Lines are written when the response has left.
        await eventually(lambda: len(access_lines(caplog)) == 3)
    assert [record.request_id for record in access_lines(caplog)][:2] == ["mine", "in-body"]
    assert access_lines(caplog)[0].getMessage().startswith("POST /v1/completions 200 ")


async def test_a_path_cannot_forge_log_lines(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagewire.gateway"):
        await client.get("/a%0a10:00:00%20I%20gateway%20forged%1b[2J")
        await eventually(lambda: len(access_lines(caplog)) == 1)
    assert access_lines(caplog)[0].getMessage().startswith("GET /a%0A10%3A00%3A00%20I%20gateway%20forged%1B%5B2J 400 ")


async def test_trace_context_passes_through(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    others = {"tracestate": "vendor=1", "baggage": "user=me"}
    for traceparent in (TRACEPARENT, "nonsense"):
        await client.post("/v1/completions", json={"prompt": "p"}, headers={"traceparent": traceparent, **others})
    contexts = [submission.context for submission in fake.submissions]
    assert [context.traceparent for context in contexts] == [TRACEPARENT, ""]
    assert [context.tracestate for context in contexts] == ["vendor=1", ""]
    assert [context.baggage for context in contexts] == ["user=me"] * 2


async def test_span_of_a_generation(
    client: httpx.AsyncClient, fake: FakeTokenizer, exporter: InMemorySpanExporter
) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    await client.post("/v1/chat/completions", json=body, headers={"traceparent": TRACEPARENT})
    await eventually(exporter.get_finished_spans)
    [span] = exporter.get_finished_spans()
    assert span.name == "POST /v1/chat/completions"
    assert format(span.context.trace_id, "032x") == TRACE_ID
    assert format(span.parent.span_id, "016x") == "00f067aa0ba902b7"
    # What comes after it in the line hangs below it.
    assert fake.submissions[0].context.traceparent.split("-")[2] == format(span.context.span_id, "016x")
    attributes = json.loads(span.to_json())["attributes"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pagewire",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len("<user>hi<assistant>"),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.model": "fake",
        "gen_ai.output.type": "text",
        "server.address": "127.0.0.1",
        "http.response.status_code": 200,
    }
    assert {name: attributes.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "hi"}),
        ("/generate", {"text": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/rerank", {"query": "hi", "documents": ["a"]}),
    ],
)
async def test_a_span_has_the_id_that_the_client_received(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter, path: str, body: dict[str, object]
) -> None:
    answer = (await client.post(path, json=body)).raise_for_status().json()
    assert (await client.post(path, json=body | {"model": "missing"})).status_code in (400, 404)
    await eventually(exporter.get_finished_spans)
    first, *others = exporter.get_finished_spans()
    assert first.attributes["gen_ai.response.id"] == (answer["meta_info"] if path == "/generate" else answer)["id"]
    assert not [one for one in others if "gen_ai.response.id" in one.attributes], "there was no answer"


async def test_span_and_log_of_a_failed_generation(
    client: httpx.AsyncClient, fake: FakeTokenizer, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pagewire.gateway"):
        await client.post("/v1/completions", json={"prompt": "p", "model": "missing"})
        fake.error_at = (3, RpcError(grpc.StatusCode.INTERNAL, "broken"))
        await client.post("/v1/completions", json={"prompt": "p", "stream": True})
        await eventually(lambda: len(access_lines(caplog)) == 2)
    refused, cut = exporter.get_finished_spans()
    assert refused.status.is_ok and "error.type" not in refused.attributes, "the client's fault"
    assert not cut.status.is_ok and cut.attributes["error.type"] == "500"
    assert refused.attributes["http.response.status_code"] == 404
    assert cut.status.description == "broken"
    assert access_lines(caplog)[1].getMessage().endswith("prompt=1 completion=3: broken")


async def test_several_processes_share_a_port_only_with_the_flag(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, reuse_port=True) as first:
        port = first.base_url.port
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}.*--port"):
            main.listen(GatewayConfig(port=port))
        async with running_gateway(address, reuse_port=True, port=port) as second:
            await wait_ready(second)


async def test_a_call_is_made_again_if_the_tokenizer_dies_under_it(address: str) -> None:
    asked = asyncio.Event()

    class Slow(FakeTokenizer):
        async def Tokenize(self, request, context):
            asked.set()
            await self.running.wait()
            return await super().Tokenize(request, context)

    fake = Slow()
    await fake.start(address)
    async with running_gateway(address) as client:
        await wait_ready(client)
        fake.running.clear()
        call = asyncio.create_task(client.post("/tokenize", json={"prompt": "ab"}))
        await asked.wait()
        await fake.stop()
        fake.running.set()
        await fake.start(address)
        assert (await call).json()["tokens"] == [94, 97, 98]
    await fake.stop()
