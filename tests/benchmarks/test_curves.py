"""The benchmarks that write curves, on few and small points."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import executor_step, scheduler_step, start
from benchmarks.peers import in_process
from benchmarks.peers.in_process import PeerFlags, Times
from pagewire.tools.bench import curves


class Words:
    """A library in which a word is a token, of which every request gets one per second, after its batch's size."""

    def __init__(self, flags: PeerFlags) -> None:
        self.prompts: list[str] = []

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def generate(self, prompts: Sequence[str], output_len: int) -> list[Times]:
        self.prompts += prompts
        return [Times(len(prompts), len(prompts) + output_len - 1)] * len(prompts)


def test_library_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "c.json"
    argv = [str(tmp_path), "--json-out", str(out), "--label=lib", "--concurrency=1,4", "--prompt-lens=128"]
    monkeypatch.setattr(sys, "argv", ["lib.py", *argv, "--num-prompts=2", "--output-len=9"])
    engines: list[Words] = []

    def load(flags: PeerFlags) -> Words:
        engines.append(Words(flags))
        return engines[0]

    assert in_process.main("lib", PeerFlags, "", load) == 0
    at_once, lengths = curves.read(out)
    assert [(p["ttft_p50_ms"], p["tpot_p50_ms"]) for p in at_once.points] == [(1000, 1000), (4000, 1000)]
    # Two batches of 1, 9 s each; one of 4, 12 s.
    assert [p["output_tok_per_s"] for p in at_once.points] == [1, 3]
    assert [(p["prompt_tokens"], p["ttft_p50_ms"]) for p in lengths.points] == [(128, 1000)]
    assert len(set(engines[0].prompts)) == len(engines[0].prompts) == 1 + 2 + 4 + 2


def test_a_library_without_its_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lib.py", "/no/such/model"])
    assert in_process.main("lib", PeerFlags, "", Words) == 1
    assert "no model '/no/such/model'" in capsys.readouterr().err


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
