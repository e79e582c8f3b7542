"""The tool that writes tuning tables, with made-up times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.gpu.report import Budget
from benchmarks.kernels import tune
from pagewire.kernels import tuning

CPU = torch.device("cpu")
PREFILL = "prefill_attention"
SHAPE = {"head_dim": 96, "kv_bytes": 2, "block_size": 16, "group": 1, "batch": 1, "query_len": 4096}


def made_up(best: dict[str, int], gain: float) -> Any:
    """In place of `tune._measure`: every configuration takes 1 µs, the best one less."""

    def measure(kernel: str, problems: object, configs: list[tune.Config], device: object, result: tune.Search) -> None:
        for config in configs:
            result.seconds[tuple(config.values())] = 1e-6 / (gain if dict(config) == best else 1)

    return measure


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tune, "problems_of", lambda *_: [])
    return tmp_path


def run(shapes: list[tune.Shape], out: Path, seconds: float = 60) -> list[str]:
    return tune.tune(PREFILL, shapes, CPU, out, Budget(seconds), "python -m ...")


def look_up(directory: Path, monkeypatch: pytest.MonkeyPatch, **shape: int) -> dict[str, int]:
    """In the written tables."""
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "DIRECTORY", directory)
        table = tuning.load_table.__wrapped__(PREFILL, 90)
    return dict(tuning.nearest(tuning.KERNELS[PREFILL], table, SHAPE | shape).config)


def test_the_fastest_is_written_and_others_keep_theirs(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(tuning.lookup(PREFILL, 90, **SHAPE))
    best = before | {"block_n": 16}
    monkeypatch.setattr(tune, "_measure", made_up(best, 2.0))
    assert run([SHAPE], tables) == []
    assert look_up(tables, monkeypatch) == best
    for other in ({"query_len": 64, "batch": 8}, {"head_dim": 80, "query_len": 64, "batch": 8}, {"head_dim": 128}):
        assert look_up(tables, monkeypatch, **other) == tuning.lookup(PREFILL, 90, **SHAPE | other)
    table = json.loads((tables / f"{PREFILL}.sm_90.json").read_text())
    assert table["provenance"]["measured"].keys() == {"device", "date", "command", "torch", "triton"}
    assert [entry["microseconds"] for entry in table["entries"] if "microseconds" in entry] == [0.5]


def test_noise_changes_nothing(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(tuning.lookup(PREFILL, 90, **SHAPE))
    monkeypatch.setattr(tune, "_measure", made_up(before | {"block_n": 16}, 1.01))
    assert run([SHAPE], tables) == []
    assert look_up(tables, monkeypatch) == before


def test_a_shape_without_a_right_configuration_is_reported(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_measure", lambda *_: None)
    (line,) = run([SHAPE], tables)
    assert "head_dim=96" in line and "no configuration works" in line
    assert not list(tables.iterdir())


def test_what_does_not_fit_in_the_budget_is_left_out(tables: Path) -> None:
    assert run([SHAPE], tables, seconds=0) == []
    assert not list(tables.iterdir())


def test_forced_configurations_are_looked_up_only_inside() -> None:
    before = tuning.lookup(PREFILL, 90, **SHAPE)
    with tune.forced(PREFILL, {"block_m": 16}):
        assert tuning.lookup(PREFILL, 90, **SHAPE) == {"block_m": 16}
        assert "min_split" in tuning.lookup("decode_attention", 90, **SHAPE)
    assert tuning.lookup(PREFILL, 90, **SHAPE) == before
