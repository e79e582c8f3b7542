"""Dashboards, rules and the runbook fit each other and what services export. `live.py` runs them against Prometheus."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.observability import __main__ as observability
from deploy.observability.dashboards import dashboards
from deploy.observability.rules import Objectives, alerts, recordings
from pagewire import config
from pagewire.gateway.operation.exposition.merge import expose
from tests.expositions import fresh_expositions

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
GOAL = Objectives()
# Of the client library, which reads them from /proc.
_OF_PROCESSES = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
_NAME = re.compile(r"\b(?:pagewire:|process_)\w+")
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: apt install prometheus)")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
    exposition = expose([("m", fresh_expositions())], "", with_vllm_names=False).content.decode()
    return {
        f"{family.name}{suffix}"
        for family in text_string_to_metric_families(exposition)
        for suffix in suffixes.get(family.type, ("",))
    }


def test_generated_files_are_up_to_date() -> None:
    """The command after a change: python -m deploy.observability"""
    for path, content in observability.files(GOAL).items():
        assert (observability.HERE / path).read_text() == content, path
    written = {path.name for path in (observability.HERE / "grafana/dashboards").iterdir()}
    assert written == {f"{dashboard.uid}.json" for dashboard in dashboards(GOAL)}


def test_every_metric_asked_for_is_exported(exported: set[str]) -> None:
    queries = [one for board in dashboards(GOAL) for panel in board.panels() for one in panel.expressions()]
    queries += [alert.expr for alert in alerts(GOAL)] + list(recordings(GOAL).values())
    asked = {name for query in queries for name in _NAME.findall(query)}
    assert len(asked) > 60
    assert asked - _OF_PROCESSES - exported == set()


def test_every_recorded_name_asked_for_is_recorded() -> None:
    asked = " ".join(alert.expr for alert in alerts(GOAL)) + " ".join(
        one for board in dashboards(GOAL) for panel in board.panels() for one in panel.expressions()
    )
    assert set(re.findall(r"\bmodel:\w+:\w+", asked)) <= set(recordings(GOAL))


def test_every_alert_has_its_section_in_the_runbook_and_every_section_its_alert() -> None:
    assert re.findall(r"^## (.*)$", RUNBOOK, re.MULTILINE) == [alert.name for alert in alerts(GOAL)]
    [_, raised] = yaml.safe_load((observability.HERE / "prometheus/pagewire.rules.yml").read_text())["groups"]
    for rule in raised["rules"]:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / page).exists() and anchor == rule["alert"].lower()


def test_the_runbook_names_flags_and_panels_that_there_are() -> None:
    kinds = (config.GatewayConfig, config.TokenizerConfig, config.SchedulerConfig, config.ExecutorConfig)
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)} | {"url"}  # of pagewire doctor
    named = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w-]*)", RUNBOOK)}
    assert named <= fields, named - fields
    metrics = set(re.findall(r"pagewire:\w+", RUNBOOK))
    text = " ".join(json.dumps(board.json()) for board in dashboards(GOAL))
    titles = {panel.title for board in dashboards(GOAL) for panel in board.panels()}
    for name in re.findall(r"\*([A-Z][^*\n]+)\*", RUNBOOK):
        assert name in titles, name
    assert all(name in text or name == "pagewire:executor_rank_wait_seconds" for name in metrics)


def test_objectives_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ValueError, match=r"within 0.6 s: choose one of .*0.5, 0.75"):
        Objectives(ttft_s=0.6)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Objectives(share=99)


def test_panels_of_a_dashboard_do_not_overlap() -> None:
    for board in dashboards(GOAL):
        taken: set[tuple[int, int]] = set()
        for panel in board.json()["panels"]:
            place: dict[str, Any] = panel["gridPos"]
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
            taken |= cells


@promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "rules", "--lint=all", "--lint-fatal", str(observability.HERE / "prometheus/pagewire.rules.yml")],
        ["check", "config", str(observability.HERE / "prometheus/prometheus.yml")],
        ["test", "rules", str(Path(__file__).with_name("rules.test.yml"))],
    ],
    ids=["rules", "config", "examples"],
)
def test_promtool_accepts(arguments: list[str]) -> None:
    finished = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
