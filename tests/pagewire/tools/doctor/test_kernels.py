"""The doctor's findings on the kernels of an executor on the CPU."""

from pathlib import Path

import pytest

from pagewire.kernels.backends import BuildError
from pagewire.kernels.cpu.runtime.build import Outlook
from pagewire.tools.doctor.command import DoctorConfig
from pagewire.tools.doctor.finding import Finding, Level
from pagewire.tools.doctor.kernels import check_kernels
from tests.pagewire.tools.doctor.machines import RecordedHost, good, smi


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWIRE_CPU_KERNELS", raising=False)


def finding(tmp_path: Path, found: Outlook | BuildError, device: str = "auto", *, has_gpu: bool = False) -> Finding:
    def outlook() -> Outlook:
        if isinstance(found, BuildError):
            raise found
        return found

    host = RecordedHost(tmp_path, good(), commands=smi({}) if has_gpu else {})
    (one,) = check_kernels(host, DoctorConfig(port=0, grpc_port=0, device=device), outlook)
    return one


NONE = BuildError("no C++ compiler (g++ not found)")


def test_without_kernels_the_cause_the_cost_and_the_remedy_are_named(tmp_path: Path) -> None:
    found = finding(tmp_path, NONE)
    assert (found.level, found.found) == (Level.WARNING, "no C++ compiler (g++ not found)")
    assert "times slower" in found.meaning and "apt install g++" in found.remedy


def test_kernels_that_are_there_or_will_be_are_no_fault(tmp_path: Path) -> None:
    assert finding(tmp_path, Outlook(tmp_path)) == Finding(Level.OK, "CPU kernels", str(tmp_path))
    later = finding(tmp_path, Outlook(None, "g++ 12"))
    assert later.level is Level.OK and "the first start compiles them" in later.found and "g++ 12" in later.found


def test_kernels_that_are_turned_off_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "torch")
    found = finding(tmp_path, Outlook(tmp_path))
    assert found.level is Level.WARNING and "PAGEWIRE_CPU_KERNELS=torch" in found.found


@pytest.mark.parametrize(
    ("device", "has_gpu", "level"),
    [("auto", True, Level.ABSENT), ("cuda", False, Level.ABSENT), ("cpu", True, Level.WARNING)],
)
def test_only_the_cpu_needs_them(tmp_path: Path, device: str, has_gpu: bool, level: Level) -> None:
    assert finding(tmp_path, NONE, device, has_gpu=has_gpu).level is level
