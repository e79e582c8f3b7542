"""The systemd units: systemd reads them, and the services read their command lines."""

import configparser
import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pagewire import flags
from tests.deploy.stack_files import CONFIGURATIONS, ROOT

UNITS = ROOT / "deploy" / "systemd"
LINE = ["gateway", "tokenizer", "scheduler", "executor"]
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


class Unit(configparser.RawConfigParser):
    """Keys may be there several times; the last one is kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))
        self.read(path)

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit(name: str) -> Unit:
    return Unit(UNITS / f"pagewire-{name}.service")


def configuration(name: str) -> Any:
    command = shlex.split(unit(name)["Service"]["ExecStart"])
    assert command[:4] == ["/opt/pagewire/bin/python", "-m", "pagewire.cli", name]
    return flags.parse(CONFIGURATIONS[name], command[4:], prog=name, description="", environ={})


def verify(directory: Path) -> subprocess.CompletedProcess[str]:
    """systemd-analyze wants the program to be there."""
    for path in UNITS.glob("*.*"):
        if path.suffix in (".service", ".target"):
            text = path.read_text().replace("/opt/pagewire/bin/python", "/bin/true")
            (directory / path.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(directory / "pagewire.target")]
    command += [str(directory / f"pagewire-{name}.service") for name in LINE]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@analyze
def test_systemd_reads_the_units_without_a_word(tmp_path: Path) -> None:
    finished = verify(tmp_path)
    assert (finished.returncode, [line for line in finished.stderr.splitlines() if "pagewire" in line]) == (0, [])


@analyze
@pytest.mark.parametrize("name", LINE)
def test_a_service_is_hardly_exposed(name: str) -> None:
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--threshold=30",
        str(UNITS / f"pagewire-{name}.service"),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stdout[-300:]


def test_each_service_finds_its_neighbour() -> None:
    gateway, tokenizer, scheduler, executor = map(configuration, LINE)
    for front, behind in (
        (gateway.tokenizer_address, tokenizer.listen),
        (tokenizer.scheduler_address, scheduler.listen),
        (scheduler.executor_address, executor.listen),
    ):
        assert front == behind.replace("127.0.0.1", "localhost")
    for name, behind in itertools.pairwise(LINE):
        assert f"pagewire-{behind}.service" in unit(name)["Unit"]["After"]


@pytest.mark.parametrize("name", LINE)
def test_a_service_has_started_when_it_is_healthy_and_has_time_to_drain(name: str) -> None:
    settings, service = configuration(name), unit(name)["Service"]
    asked = re.search(r"pagewire\.health (\S+)( pagewire\.v1\.\w+)?;", service["ExecStartPost"])
    assert asked is not None
    where = f"http://{settings.host}:{settings.port}/readyz" if name == "gateway" else settings.listen
    assert asked[1] == where
    assert float(service["TimeoutStopSec"]) > settings.shutdown_timeout + getattr(settings, "drain_delay", 0)


def test_the_target_has_all_of_them() -> None:
    wanted = Unit(UNITS / "pagewire.target")["Unit"]["Wants"].split()
    assert sorted(wanted) == sorted(path.name for path in UNITS.glob("*.service"))
