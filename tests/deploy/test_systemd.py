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


def environment(name: str, **files: str) -> dict[str, str]:
    """Returns the environment of the service; its EnvironmentFile (`files`) takes precedence."""
    text = (UNITS / f"pagewire-{name}.service").read_text()
    words = [word for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE) for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words) | files


def configuration(name: str, **files: str) -> Any:
    """No flag is given, so that every variable holds."""
    command = shlex.split(unit(name)["Service"]["ExecStart"])
    assert command == ["/opt/pagewire/bin/python", "-m", "pagewire.cli", name]
    return flags.parse(CONFIGURATIONS[name], [], prog=name, description="", environ=environment(name, **files))


def asked_for_health(name: str, **files: str) -> str:
    """Returns the words that systemd and the shell make of the words behind `pagewire.wire.health`."""
    (shell, option, script) = shlex.split(unit(name)["Service"]["ExecStartPost"])
    script = script.replace("$$", "$").replace("%%", "%")
    script = script.replace("/opt/pagewire/bin/python -m pagewire.wire.health", "echo")
    return subprocess.run([shell, option, script], env=environment(name, **files), check=True, capture_output=True,
                          text=True).stdout.strip()  # fmt: skip


def verify(directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs systemd-analyze, which requires that the program exists."""
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
    other = (
        {"PAGEWIRE_HOST": "10.0.0.1", "PAGEWIRE_PORT": "80"} if name == "gateway" else {"PAGEWIRE_LISTEN": "a:1,b:2"}
    )
    for files in ({}, other):
        settings, service = configuration(name, **files), unit(name)["Service"]
        is_rest = name == "gateway"
        where = f"http://{settings.host}:{settings.port}/readyz" if is_rest else settings.listen.split(",")[0]
        assert asked_for_health(name, **files).split()[0] == where
    assert float(service["TimeoutStopSec"]) > settings.shutdown_timeout + getattr(settings, "drain_delay", 0)


def test_the_target_has_all_of_them() -> None:
    wanted = Unit(UNITS / "pagewire.target")["Unit"]["Wants"].split()
    assert sorted(wanted) == sorted(path.name for path in UNITS.glob("*.service"))
