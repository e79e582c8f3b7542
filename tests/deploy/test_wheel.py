"""A wheel with kernels: what it is named, and that it needs no compiler."""

from __future__ import annotations

import platform
import re
import runpy
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from pagewire.kernels.cpu.runtime import build, variants

ROOT = Path(__file__).parents[2]
HOOK: dict[str, Any] = runpy.run_path(str(ROOT / "deploy/wheel_hook.py"))

LOAD = """
from pagewire.kernels.cpu.runtime import build
print(build.load_library()._name)
"""


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        ("GLIBC_2.2.5 GLIBC_2.14 GLIBCXX_3.4.19", "manylinux_2_17"),
        ("GLIBC_2.28 GLIBCXX_3.4.22", "manylinux_2_28"),
        ("GLIBC_2.17 GLIBCXX_3.4.29", "manylinux_2_34"),
        ("GLIBC_2.36 GLIBCXX_3.4.30", "manylinux_2_36"),
        ("GLIBC_2.17", "manylinux_2_17"),
        ("GLIBC_2.17 GLIBCXX_3.4.99", "linux"),
    ],
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the tags are of glibc")
def test_the_tag_names_the_oldest_system_that_has_all_symbols(
    symbols: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = subprocess.CompletedProcess([], 0, symbols)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: said)
    assert HOOK["platform_tag"]([]) == f"{tag}_{platform.machine()}"


def built(directory: Path) -> zipfile.ZipFile:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(directory), versions=["standard"])
    return zipfile.ZipFile(wheel)


@pytest.mark.parametrize("variable", ["PAGEWIRE_WHEEL_KERNELS=none", "CXX=no-such-compiler"])
def test_a_wheel_without_kernels_suits_every_machine(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable.split("="))
    with built(tmp_path) as wheel:
        assert wheel.filename is not None and wheel.filename.endswith("-py3-none-any.whl")
        assert not [name for name in wheel.namelist() if name.endswith(".so")]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path) -> None:
    with built(tmp_path / "dist") as wheel:
        names = {Path(name).name for name in wheel.namelist() if name.endswith(".so")}
        assert wheel.filename is not None
    assert names == {build.shipped_name(variant) for variant in variants.of_machine()}
    assert re.search(rf"-py3-none-(many)?linux_\w*{platform.machine()}\.whl$", wheel.filename)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel.filename], check=True)
    environment = {"PATH": "", "PAGEWIRE_CACHE_DIR": str(tmp_path / "cache")}
    loaded = subprocess.run([python, "-c", LOAD], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert Path(loaded.stdout.strip()).is_relative_to(tmp_path / "venv")
    assert not (tmp_path / "cache").exists()
