"""The benchmarks that write curves, on few and small points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import executor_step, scheduler_step, start
from pagewire.tools.bench import curves


def test_scheduler_against_running_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "c.json"
    monkeypatch.setattr(sys, "argv", ["scheduler_step.py", "--json-out", str(out)])
    monkeypatch.setattr(scheduler_step, "BATCH_SIZES", (2, 8))
    scheduler_step.main()
    (curve,) = curves.read(out)
    assert (curve.kind, curve.command) == ("running-requests", f"python -m benchmarks.scheduler_step --json-out {out}")
    for point in curve.points:
        total = sum(point["us_per_step"].values())
        assert point["us_per_request"] * point["running_requests"] == pytest.approx(total)
    assert [point["running_requests"] for point in curve.points] == [2, 8]


def test_step_against_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_gguf: Path) -> None:
    out = tmp_path / "c.json"
    argv = [str(smollm2_gguf), "--json-out", str(out), "--requests", "1", "2", "--contexts", "1", "40", "9999999"]
    monkeypatch.setattr(sys, "argv", ["executor_step.py", *argv])
    executor_step.main()  # longer contexts than the model has positions are left out
    found = {curve.label: [point["context_tokens"] for point in curve.points] for curve in curves.read(out)}
    assert found == {"Pagewire, 1 request": [1, 40], "Pagewire, 2 requests": [1, 40]}


@pytest.mark.slow
def test_start_against_model_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.json"
    monkeypatch.setattr(sys, "argv", ["start.py", "--json-out", str(out), "--sizes", "10M"])
    start.main()
    (curve,) = curves.read(out)
    assert curve.kind == "model-size" and 10e6 < curve.points[0]["parameters"] < 12e6
    dies = "{python} -c 'raise SystemExit(\"port {port} is mine\")'"
    monkeypatch.setattr(sys, "argv", ["start.py", "--sizes", "10M", "--command", dies])
    with pytest.raises(SystemExit, match=r"gave no token .*\n.*is mine"):
        start.main()


def test_a_file_that_cannot_be_written_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scheduler_step.py", "--json-out", "/no/such/folder/c.json"])
    with pytest.raises(SystemExit, match="2"):
        scheduler_step.main()
    assert "cannot write /no/such/folder/c.json" in capsys.readouterr().err
