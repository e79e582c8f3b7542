"""Checks what travels to a GPU machine: stubs for an old protobuf, and compiled kernels where Triton finds them."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import luggage, triton_cache
from benchmarks.gpu.__main__ import _with_stubs
from benchmarks.gpu.parts import Part

# As an older protobuf refuses stubs that were made by a newer one.
OLD = "raise ImportError('Detected incompatible Protobuf Gencode/Runtime versions: gencode 7.35.1 runtime 6.33.0')"
# Imports a package `stubs` instead of ours: what a path has comes first.
IMPORT = "import stubs"


def python_with(directory: Path, module: str) -> str:
    """A Python that has this module `stubs` installed, behind whatever PYTHONPATH names."""
    (directory / "site").mkdir()
    (directory / "site" / "stubs.py").write_text(module)
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{directory}/site" exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


def wheel(directory: Path, module: str) -> None:
    (directory / luggage.STUBS).mkdir(parents=True)
    with zipfile.ZipFile(directory / luggage.STUBS / "stubs-7.35.1-py3-none-any.whl", "w") as archive:
        archive.writestr("stubs.py", module)


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(luggage, "_IMPORT", IMPORT)


def test_stubs_that_travelled_replace_what_is_too_old(tmp_path: Path) -> None:
    wheel(tmp_path / "peers", "")
    python = python_with(tmp_path, OLD)
    environment, lines, fault = luggage.unpacked(tmp_path / "unpacked", tmp_path / "peers", python)
    assert fault == "" and environment == {"PYTHONPATH": str(tmp_path / "unpacked" / luggage.STUBS)}
    assert lines[0].startswith("stubs: stubs-7.35.1-py3-none-any.whl instead of what is installed, as ImportError:")


def test_what_is_new_enough_stays(tmp_path: Path) -> None:
    wheel(tmp_path / "peers", OLD)
    environment, lines, fault = luggage.unpacked(tmp_path, tmp_path / "peers", python_with(tmp_path, ""))
    assert (environment, lines, fault) == ({}, ["compiled kernels: none travelled"], "")


def test_parts_that_need_stubs_say_why_they_cannot_run(tmp_path: Path) -> None:
    _, lines, fault = luggage.unpacked(tmp_path, tmp_path / "peers", python_with(tmp_path, OLD))
    assert "peer_kernels.fetch" in lines[0] and "runtime 6.33.0" in fault
    parts = _with_stubs([Part("engine", (), 1, needs_stubs=True), Part("kernels", (), 1)], fault)
    assert [part.lacks for part in parts] == [fault, ""]


def compiled(directory: Path) -> Path:
    """A cache with one kernel, as Triton leaves it."""
    kernel = directory / "ABC"
    kernel.mkdir(parents=True)
    for name in ("__grp__decode.json", "decode.json", "decode.cubin", "decode.ttir", "decode.llir"):
        (kernel / name).write_text(name)
    return directory


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    triton_cache.pack(compiled(tmp_path / "cache"), tmp_path / "packed", "triton 3.6.0-abc")
    return tmp_path / "packed"


def python_that_says(directory: Path, key: str) -> str:
    program = directory / "python"
    program.write_text(f"#!/bin/sh\necho '{key}'\n")
    program.chmod(0o755)
    return str(program)


def test_compiled_kernels_are_unpacked_where_their_key_fits(tmp_path: Path, packed: Path) -> None:
    python, target = python_that_says(tmp_path, "triton 3.6.0-abc"), tmp_path / "target"
    line, environment = triton_cache.unpacked(packed, python, target)
    assert line == "compiled kernels: 1 travelled" and environment == {"TRITON_CACHE_DIR": str(target)}
    assert sorted(path.name for path in (target / "ABC").iterdir()) == [
        "__grp__decode.json", "decode.cubin", "decode.json",
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["triton 3.6.0-abd", ""])
def test_compiled_kernels_of_another_build_are_left_out(tmp_path: Path, packed: Path, key: str) -> None:
    line, environment = triton_cache.unpacked(packed, python_that_says(tmp_path, key), tmp_path / "target")
    assert "another build of Triton" in line and environment == {}
    assert not (tmp_path / "target").exists()


def test_the_key_is_of_tritons_files_and_its_assembler() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from triton.runtime.cache import triton_key

    assert triton_cache.key().startswith(triton_key()) and triton_cache.key().endswith("-90")
    assert not os.environ.get("TRITON_PTXAS_PATH"), "the assembler would be another"
