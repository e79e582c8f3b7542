"""The services of `docker compose --profile observability up`."""

from pathlib import PurePosixPath
from typing import Any

import yaml

from deploy.observability.__main__ import HERE
from tests.deploy.stack_files import COMPOSE, ROOT, services

BESIDE = {name: service for name, service in services().items() if "profiles" in service}


def configuration(path: str) -> Any:
    return yaml.safe_load((HERE / path).read_text())


def mounts(name: str) -> dict[PurePosixPath, str]:
    """Source by target."""
    return {PurePosixPath(target): source for source, target, *_ in (one.split(":") for one in BESIDE[name]["volumes"])}


def test_nothing_of_it_starts_unasked_and_it_is_published_on_loopback_only() -> None:
    assert set(BESIDE) == {"prometheus", "grafana", "collector", "jaeger"}
    for service in BESIDE.values():
        assert service["profiles"] == ["observability"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["image"].rpartition(":")[2][0] in "v0123456789", "a version"


def test_what_is_mounted_is_there() -> None:
    volumes = yaml.safe_load(COMPOSE.read_text())["volumes"]
    for name, service in BESIDE.items():
        for source in mounts(name).values() if "volumes" in service else []:
            assert (ROOT / source).exists() if source.startswith(".") else source in volumes, source


def test_prometheus_asks_the_port_that_the_gateway_opens() -> None:
    port = services()["gateway"]["environment"]["PAGEWIRE_METRICS_PORT"]
    [job] = configuration("prometheus/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"gateway:{port}"]}]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    [source] = configuration("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    published = BESIDE["prometheus"]["ports"][0].rpartition(":")[2]
    assert source["url"] == f"http://prometheus:{published}"
    interval = configuration("prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    [provider] = configuration("grafana/provisioning/dashboards/pagewire.yml")["providers"]
    assert PurePosixPath(provider["options"]["path"]) in mounts("grafana")
    home = PurePosixPath(BESIDE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / mounts("grafana")[home.parent] / home.name).exists()


def test_the_collector_sends_traces_to_the_viewer() -> None:
    collector = configuration("otel-collector.yml")
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline.get(kind, [])) <= set(collector[kind])
    [exporter] = collector["service"]["pipelines"]["traces"]["exporters"]
    assert collector["exporters"][exporter]["endpoint"].partition(":")[0] in BESIDE


def test_prometheus_beside_a_stack_on_one_machine_asks_another_port_than_its_own() -> None:
    own = "9090"
    [job] = configuration("prometheus/local.yml")["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target.rpartition(":")[2] != own
    assert f"--metrics-port {target.rpartition(':')[2]}" in " ".join((ROOT / "docs/operations.md").read_text().split())
