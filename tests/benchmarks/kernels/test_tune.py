"""The tool that writes tuning tables, with made-up times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.gpu.report import Budget
from benchmarks.kernels import grids, search, tune
from benchmarks.kernels.supervised import Journal, supervise
from pagewire.kernels import tuning

CPU = torch.device("cpu")
PREFILL = "prefill_attention"
SHAPE = {"head_dim": 96, "kv_bytes": 2, "block_size": 16, "group": 1, "batch": 1, "query_len": 4096}


def made_up(best: dict[str, int], gain: float) -> Any:
    """A stand-in for `tune._measure`: every configuration takes 1 µs, the best one less."""

    def measure(trial: search.Trial, configs: list[search.Config], result: search.Search) -> None:
        for config in configs:
            result.seconds[tuple(config.values())] = 1e-6 / (gain if dict(config) == best else 1)

    return measure


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(search, "problems_of", lambda *_: [])
    return tmp_path


def run(shapes: list[tune.Shape], out: Path, seconds: float = 60) -> list[str]:
    return tune.tune(PREFILL, shapes, CPU, out, Budget(seconds), "python -m ...")


def look_up(directory: Path, monkeypatch: pytest.MonkeyPatch, **shape: int) -> dict[str, int]:
    """Looks a shape up in the written tables."""
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "DIRECTORY", directory)
        table = tuning.load_table.__wrapped__(PREFILL, 90)
    return dict(tuning.nearest(tuning.KERNELS[PREFILL], table, SHAPE | shape).config)


def test_the_fastest_is_written_and_others_keep_theirs(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(tuning.lookup(PREFILL, 90, **SHAPE))
    best = before | {"block_n": 16}
    monkeypatch.setattr(search, "_measure", made_up(best, 2.0))
    assert run([SHAPE], tables) == []
    assert look_up(tables, monkeypatch) == best
    for other in ({"query_len": 64, "batch": 8}, {"head_dim": 80, "query_len": 64, "batch": 8}, {"head_dim": 128}):
        assert look_up(tables, monkeypatch, **other) == tuning.lookup(PREFILL, 90, **SHAPE | other)
    table = json.loads((tables / "sm_90" / f"{PREFILL}.json").read_text())
    assert table["provenance"]["measured"].keys() == {"device", "date", "command", "torch", "triton"}
    assert [entry["microseconds"] for entry in table["entries"] if "microseconds" in entry] == [0.5]


def test_noise_changes_nothing(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(tuning.lookup(PREFILL, 90, **SHAPE))
    monkeypatch.setattr(search, "_measure", made_up(before | {"block_n": 16}, 1.01))
    assert run([SHAPE], tables) == []
    assert look_up(tables, monkeypatch) == before


def test_a_shape_without_a_right_configuration_is_reported(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_measure", lambda *_: None)
    (line,) = run([SHAPE], tables)
    assert "head_dim=96" in line and "no configuration works" in line
    assert not list(tables.iterdir())


def test_what_does_not_fit_in_the_budget_is_left_out(tables: Path) -> None:
    assert run([SHAPE], tables, seconds=0) == []
    assert not list(tables.iterdir())


def test_forced_configurations_are_looked_up_only_inside() -> None:
    before = tuning.lookup(PREFILL, 90, **SHAPE)
    with search.forced(PREFILL, {"block_m": 16}):
        assert tuning.lookup(PREFILL, 90, **SHAPE) == {"block_m": 16}
        assert "min_split" in tuning.lookup("decode_attention", 90, **SHAPE, context=4096)
    assert tuning.lookup(PREFILL, 90, **SHAPE) == before


class Refusing:
    """A problem with a configuration that cannot be compiled."""

    def calls(self) -> list[Any]:
        return [lambda: None]

    def is_right(self) -> bool:
        if tuning.lookup(PREFILL, 90, **SHAPE)["num_stages"] == 3:
            raise RuntimeError("Internal Triton PTX codegen error: `ptxas` stderr: C7600")
        return True


def test_what_one_configuration_raises_costs_only_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "problems_of", lambda *_: [Refusing()])
    monkeypatch.setattr(search, "forms_of", lambda *_: grids.forms_of(*_[:3]))
    result = search.search(PREFILL, SHAPE, CPU, Journal())
    forms = grids.forms_of(PREFILL, SHAPE, tuning.lookup(PREFILL, 90, **SHAPE))
    refused = {tuple(form.values()) for form in forms if form["num_stages"] == 3}
    assert result.refused == len(refused) > 0
    assert {tuple(form.values()) for form in forms} - refused == set(result.seconds)


WORKER = """
import os, sys, time
from pathlib import Path
from benchmarks.kernels.supervised import Journal
journal = Journal(Path(sys.argv[1]))
for index in range(4):
    shape, config = {"tokens": 1}, {"block_n": index}
    if journal.is_left_out("k", shape, config):
        continue
    journal.trying("k", shape, config)
    if index == 1:
        os.abort()
    if index == 2:
        time.sleep(600)
journal.done("k", {"tokens": 1})
"""


def test_a_configuration_that_ends_or_holds_the_process_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    crashed, hung = supervise([sys.executable, "-c", WORKER, str(path)], path, seconds=60, patience=3)
    assert "SIGABRT" in crashed and '"block_n": 1' in crashed
    assert "more than 3 s" in hung and '"block_n": 2' in hung
    assert Journal(path).is_done("k", {"tokens": 1})


def test_a_run_that_is_begun_again_keeps_what_was_measured(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = dict(tuning.lookup(PREFILL, 90, **SHAPE)) | {"block_n": 16}
    monkeypatch.setattr(search, "_measure", made_up(best, 2.0))
    journal, other = Journal(tables / "journal"), SHAPE | {"query_len": 512}
    runs: list[list[tune.Shape]] = [[SHAPE], [other]]
    for shapes in runs:
        assert tune.tune(PREFILL, shapes, CPU, tables, Budget(60), "python -m ...", journal) == []
    rows = json.loads((tables / "sm_90" / f"{PREFILL}.json").read_text())["entries"]
    assert [row["shape"] for row in rows if "microseconds" in row] == [other, SHAPE]


@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_no_more_is_tried_than_can_win(kernel: str) -> None:
    """The bound holds for all shapes of a run: each form is compiled once."""
    from benchmarks.kernels.shapes import tuned_shapes

    shapes = tuned_shapes(kernel, "small", 90)
    counts = [len(grids.forms_of(kernel, shape, tuning.lookup(kernel, 90, **shape))) for shape in shapes]
    assert min(counts) > 3 and max(counts) <= 40
    forms = {tuple(form.values()) for shape in shapes for form in grids.forms_of(kernel, shape, {})}
    assert len(forms) <= 140
