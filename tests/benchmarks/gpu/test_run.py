"""The first run on a GPU, with parts that crash, hang and raise: the others still run, and the table names these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as first_run
from benchmarks.gpu.parts import SMOKE, Part, measured_parts, smoke_parts
from benchmarks.gpu.processes import run_part


def program(name: str, text: str, seconds: float = 10, **options: Any) -> Part:
    return Part(name, ("-c", text), seconds, **options)


CRASHES = "import os, signal; print('launching', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
RAISES = "raise RuntimeError('CUDA error: an illegal memory access was encountered')"
# As a part that is ended while it measures: what it had written before is kept.
HANGS = (
    "import pathlib, subprocess, time; pathlib.Path('{out}/rows.json').write_text('[1]'); "
    "subprocess.Popen(['sleep', '600']); print('row 1', flush=True); time.sleep(600)"
)
WRONG = "print('WRONG: decode 3 x 40: error 0.5'); raise SystemExit(1)"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("run")
    smoke = [program("smoke crashing", CRASHES), program("smoke raising", RAISES), program("smoke fine", "print(1)")]
    measured = [
        program("hanging", HANGS, 1.6),
        program("wrong", WRONG),
        program("lacking", "", lacks="no peers"),
        program("last", "print('done')"),
    ]
    code = first_run.run(smoke, measured, out, 90)
    return code, {part["name"]: part for part in json.loads((out / "gpu.json").read_text())["parts"]}, out


def test_each_part_is_named_with_what_became_of_it(outcome: tuple[int, dict[str, Any], Path]) -> None:
    code, parts, _ = outcome
    states = {name: part["state"] for name, part in parts.items()}
    assert code == 1
    assert states == {
        "smoke crashing": "crashed",
        "smoke raising": "wrong",
        "smoke fine": "ok",
        "hanging": "hung",
        "wrong": "wrong",
        "lacking": "not run",
        "last": "ok",
    }
    details = {name: part["detail"] for name, part in parts.items()}
    assert "SIGSEGV" in details["smoke crashing"] and "launching" in details["smoke crashing"]
    assert "illegal memory access" in details["smoke raising"]
    assert "row 1" in details["hanging"]
    assert "decode 3 x 40" in details["wrong"]
    assert details["lacking"] == "no peers"


def test_what_a_part_had_written_before_it_was_ended_is_kept(outcome: tuple[int, dict[str, Any], Path]) -> None:
    _, parts, out = outcome
    assert parts["hanging"]["results"] == [[1]]
    assert "launching" in (out / "gpu.log").read_text()
    assert {path.name for path in out.iterdir()} == {"gpu.json", "gpu.log"}


def test_a_part_without_time_is_not_begun() -> None:
    outcome = run_part(program("late", "print(1)"), 1.0)
    assert outcome.state == "not run" and "no time" in outcome.detail


def test_the_table_comes_last_and_names_what_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first_run.run([], [program("lacking", "", lacks="no peers"), program("fine", "print(1)")], tmp_path, 60)
    *_, last, _files = capsys.readouterr().out.splitlines()
    assert last == "not run: lacking"


@pytest.mark.slow
def test_a_real_kernel_family_passes_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    smoke = [
        part
        for part in smoke_parts("cpu", True)
        if part.name in (f"{SMOKE} step_inputs", f"{SMOKE} grouped_gemv replayed")
    ]
    assert len(smoke) == 2
    assert first_run.run(smoke, [], tmp_path, 100) == 0


def test_every_part_fits_into_a_run(tmp_path: Path) -> None:
    """The plan fits by its own estimates: what smoke tests leave is enough for the measurements' shares."""
    seconds = sum(part.seconds for part in measured_parts("cuda", False, str(tmp_path)))
    assert 300 <= seconds <= 540, "shares are seconds of a run of 540"
