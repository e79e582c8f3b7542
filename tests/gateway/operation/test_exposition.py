"""The route /metrics: formats, vLLM's names, all gateway processes, a port without keys, and uncounted requests."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pagewire.gateway.operation.exposition.merge import expose
from pagewire.gateway.operation.siblings import Siblings
from pagewire.telemetry.recent import Accounts
from pagewire.v1.admin_pb2 import ExplainRequestRequest, ServiceMetrics
from tests.expositions import fresh_expositions
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.gateway.operation.test_admin_port import free_port

ROOT = Path(__file__).parents[3]
QUERIES = json.loads(Path(__file__).with_name("vllm_dashboard.json").read_text())
OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


def samples(text: str, name: str) -> list[Sample]:
    return [
        sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name
    ]


async def test_vllm_names_carry_the_values_of_ours(client: httpx.AsyncClient, address: str, tmp_path: Path) -> None:
    async with running_gateway(address, vllm_metrics=True, data_dir=str(tmp_path / "its own")) as named:
        await wait_ready(named)
        await named.post("/v1/completions", json={"prompt": "p", "n": 2})
        await named.post("/v1/completions", json={"prompt": "p", "model": "missing"})
        text = (await named.get("/metrics")).text
    [ours] = samples(text, "pagewire:request_params_n_sum")
    [theirs] = samples(text, "vllm:request_params_n_sum")
    assert ours.value == theirs.value > 0
    assert theirs.labels["model_name"] == "fake" and theirs.labels["engine"] == "0"
    refused = [one.value for one in samples(text, "http_requests_total") if one.labels["status"] == "4xx"]
    assert sum(refused) == sum(
        one.value for one in samples(text, "pagewire:http_requests_total") if one.labels["status"].startswith("4")
    )
    assert "vllm:" not in (await client.get("/metrics")).text


@pytest.fixture(scope="module")
def fresh() -> list[ServiceMetrics]:
    return fresh_expositions()


@pytest.fixture(scope="module")
def known(fresh: list[ServiceMetrics]) -> set[str]:
    """Names that a query can find."""
    exposition = expose([("m", fresh)], "", with_vllm_names=True).content.decode()
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
    return {
        f"{family.name}{suffix}"
        for family in text_string_to_metric_families(exposition)
        for suffix in suffixes.get(family.type, ("",))
    }


def test_every_panel_of_vllms_dashboard_finds_its_metrics(known: set[str]) -> None:
    missing = {panel["title"]: sorted(set(panel["metrics"]) - known) for panel in QUERIES["panels"]}
    assert not {title: names for title, names in missing.items() if names}


def test_what_vllms_other_dashboards_ask_for_is_there_or_the_docs_say_why_not(known: set[str]) -> None:
    table = re.findall(r"^\| (`vllm:.*?) \|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    explained = [name.removesuffix("*") for row in table for name in re.findall(r"`(vllm:\w+\*?)`", row)]
    assert len(explained) >= 9 and not [name for name in explained if name in known]
    asked = {name for names in QUERIES["dashboards"].values() for name in names} - {"up"}  # which Prometheus makes
    missing = asked - known
    assert sorted(name for name in missing if not name.startswith(tuple(explained))) == []
    assert len(asked & known) >= 60


@pytest.mark.parametrize("name", ["vllm:cuda_graphs_total", "vllm:attention_backend"])
def test_what_tutorials_of_vllm_look_for_is_there(known: set[str], name: str) -> None:
    assert name in known and name in (ROOT / "docs/operations.md").read_text()


def test_the_attention_backend_has_its_name_and_executor() -> None:
    reported = """# HELP pagewire:executor_attention_backend A
# TYPE pagewire:executor_attention_backend gauge
pagewire:executor_attention_backend{name="CPU_ATTN"} 1.0
# EOF
"""
    text = expose([("m", [ServiceMetrics(service="executor", exposition=reported)])], "", with_vllm_names=True)
    [found] = samples(text.content.decode(), "vllm:attention_backend")
    assert (found.labels["name"], found.labels["engine"], found.value) == ("CPU_ATTN", "0", 1)


def test_metrics_with_labels_of_vllms_own() -> None:
    reported = """# HELP pagewire:num_requests_waiting W
# TYPE pagewire:num_requests_waiting gauge
pagewire:num_requests_waiting 3.0
# HELP pagewire:executor_sleep_state S
# TYPE pagewire:executor_sleep_state gauge
pagewire:executor_sleep_state{executor="executor-1",sleep_state="awake"} 0.0
pagewire:executor_sleep_state{executor="executor-1",sleep_state="weights_offloaded"} 1.0
# EOF
"""
    text = expose(
        [("m", [ServiceMetrics(service="s", exposition=reported)])], "", with_vllm_names=True
    ).content.decode()
    waiting = {one.labels["reason"]: one.value for one in samples(text, "vllm:num_requests_waiting_by_reason")}
    assert waiting == {"capacity": 3, "deferred": 0}
    states = {one.labels["sleep_state"]: one.value for one in samples(text, "vllm:engine_sleep_state")}
    assert states == {"awake": 0, "weights_offloaded": 1}
    assert {one.labels["engine"] for one in samples(text, "vllm:engine_sleep_state")} == {"1"}


def test_every_metric_has_a_text_and_a_unit_that_scrapers_know(fresh: list[ServiceMetrics]) -> None:
    content, content_type = expose([("m", fresh)], OPENMETRICS["accept"], with_vllm_names=True)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = list(parse_openmetrics(content.decode()))
    for family in families:
        assert len(family.documentation.split()) > 1, family.name
        assert not family.name.endswith(("_ms", "_milliseconds", "_us", "_kb", "_mb", "_percent")), family.name
        if family.type == "histogram" and family.name.endswith("_seconds"):
            assert "econds" in family.documentation or "ime" in family.documentation, family.name
    assert {f.name for f in families} >= {"pagewire:tenant_generation_tokens", "vllm:e2e_request_latency_seconds"}


def test_values_come_through_as_they_are() -> None:
    """Any label and any trace, as OpenMetrics and in the older format."""
    odd = r"a}b,c=\"d\" \\ {e}"
    reported = "\n".join(
        [
            r"# HELP x A \"quoted\" text\nof two lines",
            "# TYPE x histogram",
            f'x_bucket{{a="{odd}",le="0.5"}} 2.0 # {{trace_id="ab",b="}} "}} 0.25 12.5',
            f'x_bucket{{a="{odd}",le="+Inf"}} 3.0',
            f'x_count{{a="{odd}"}} 3.0',
            f'x_sum{{a="{odd}"}} 1.5',
            "# EOF",
            "",
        ]
    )
    services = [ServiceMetrics(service=f"s{number}", exposition=reported) for number in range(2)]
    [given] = parse_openmetrics(reported)
    [new] = parse_openmetrics(expose([('m"', services)], OPENMETRICS["accept"], with_vllm_names=True).content.decode())
    [older] = text_string_to_metric_families(expose([('m"', services)], "", with_vllm_names=True).content.decode())
    for number in range(2):
        own = {"service": f"s{number}", "model_name": 'm"'}
        wanted = [one._replace(labels={**one.labels, **own}) for one in given.samples]
        assert [one for one in new.samples if one.labels["service"] == f"s{number}"] == wanted
        found = [one for one in older.samples if one.labels["service"] == f"s{number}"]
        assert [(one.name, one.labels, one.value) for one in found] == [(w.name, w.labels, w.value) for w in wanted]
    assert new.documentation == older.documentation == given.documentation


async def test_scrapers_choose_the_format_and_probes_are_no_requests(
    client: httpx.AsyncClient, fake: FakeTokenizer
) -> None:
    def requests(text: str) -> float:
        return sum(one.value for one in samples(text, "pagewire:http_requests_total"))

    before = requests((await client.get("/metrics")).text)
    await fake.set_serving(False)
    assert (await client.get("/readyz")).status_code == 503
    text = (await client.get("/metrics")).text
    assert requests(text) == before
    probes = {(one.labels["route"], one.labels["status"]) for one in samples(text, "pagewire:http_probes_total")}
    assert {("/readyz", "503"), ("/metrics", "200")} <= probes

    response = await client.get("/metrics", headers=OPENMETRICS)
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(response.text)}
    assert families["pagewire:shared"].type == "counter"
    models = {s.labels.get("model_name") for s in families["pagewire:shared"].samples}
    assert models == {"fake"}


async def test_the_port_for_metrics_asks_for_no_key_and_has_nothing_else(fake: FakeTokenizer, address: str) -> None:
    port = free_port()
    async with running_gateway(address, api_key="secret", metrics_port=port) as public:
        assert (await public.get("/metrics")).status_code == 401
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as scraper:
            assert "pagewire:shared_total" in (await scraper.get("/metrics")).text
            for path in ("/v1/status", "/v1/models", "/"):
                assert (await scraper.get(path)).status_code == 404


async def test_every_gateway_of_a_data_directory_is_reported(tmp_path: Path) -> None:
    none = Accounts(lambda: ())
    gateways = [Siblings(tmp_path, lambda number=number: f"gateway {number}" * 100_000, none) for number in range(3)]
    for one in gateways:
        await one.start()

    async def reported(by: Siblings) -> dict[str, str]:
        return {one.address: one.exposition[:9] for one in await by.metrics()}

    every = {f"gateway-{number}": f"gateway {number}" for number in range(3)}
    assert [await reported(one) for one in gateways] == [every] * 3
    await gateways[0].close()
    assert await reported(gateways[2]) == {name: every[name] for name in ("gateway-1", "gateway-2")}
    after = Siblings(tmp_path, lambda: "gateway 9", none)
    await after.start()
    assert await reported(gateways[1]) == every | {"gateway-0": "gateway 9"}, "the new process has the free place"
    for one in (*gateways[1:], after):
        await one.close()


async def test_an_answer_of_a_gateway_that_cannot_be_read_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asking = Siblings(tmp_path, lambda: "gateway 0", Accounts(lambda: ()))
    await asking.start()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"# TYPE of an older gateway")
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "metrics" / "1.sock"):
        assert await asking.accounts(ExplainRequestRequest(request_id="any")) == []
    assert "the account of a request from gateway-1 cannot be read" in caplog.text
    await asking.close()


async def test_gateway_processes_of_one_port_share_a_scrape(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, reuse_port=True) as first:
        port = first.base_url.port
        async with running_gateway(address, reuse_port=True, port=port) as second:
            await wait_ready(second)
            text = (await second.get("/metrics")).text
        addresses = {one.labels["address"] for one in samples(text, "pagewire:http_connection_limit")}
        assert addresses == {"gateway-0", "gateway-1"}


async def test_any_gateway_reports_what_another_knows_of_a_request(
    fake: FakeTokenizer, address: str, tmp_path: Path
) -> None:
    directory = str(tmp_path / "of both")
    async with (
        running_gateway(address, data_dir=directory) as one,
        running_gateway(address, data_dir=directory) as other,
    ):
        await wait_ready(one)
        answer = (await one.post("/v1/completions", json={"prompt": "p"})).json()
        path = f"/v1/requests/{answer['id']}/explain"
        reported = (await other.get(path)).json()
        assert reported == (await one.get(path)).json()
        assert [phase["name"] for phase in reported["outputs"][0]["phases"]] == ["gateway"]
        assert not reported["is_running"] and reported["silent"] == ["tokenizer", "scheduler"]
        assert (await other.get("/v1/requests/cmpl-unknown/explain")).status_code == 404
