"""The GPU benchmarks, proven on the CPU with tiny shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import kernels, speculation
from benchmarks.gpu.cases.case import OURS, Built, Case, Contestant
from benchmarks.gpu.engine import loads as engine_loads
from benchmarks.gpu.engine.bench import Bench
from benchmarks.gpu.engine.models import MODELS, SMALL_MODEL
from benchmarks.gpu.engine.steps import Scores
from benchmarks.gpu.engine.whole_line import Arrivals, LineError
from benchmarks.gpu.measure import Ceilings
from benchmarks.gpu.report import Budget, Report
from pagewire.kernels import ops

CPU = torch.device("cpu")


def results(directory: Path) -> dict[str, Any]:
    (path,) = directory.iterdir()
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_kernels_right_and_timed(tmp_path: Path) -> None:
    groups = [group for group in kernels.GROUPS if group != "variants"]
    assert kernels.run(groups, CPU, True, tmp_path, Budget(120)) == 0
    rows = results(tmp_path)["rows"]
    assert {row["group"] for row in rows} == {"w4a16", *groups} - {"w4"}
    assert all(row["times_us"][OURS] > 0 and row["floor_us"] > 0 for row in rows)


def case(error: Callable[[], float]) -> Case:
    return Case("step", "made up", 1024, lambda: Built({OURS: Contestant([lambda: None], error)}))


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_wrong_kernel_fails_and_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    monkeypatch.setitem(kernels.GROUPS, "step", lambda device, small: iter([case(lambda: error)]))
    assert kernels.run(["step"], CPU, True, tmp_path, Budget(60)) == 1
    data = results(tmp_path)
    assert not data["rows"] and "made up" in data["failures"][0]


def test_what_no_time_is_left_for_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.run(["step"], CPU, True, tmp_path, Budget(0)) == 0
    assert "left out" in capsys.readouterr().out
    assert len(results(tmp_path)["left_out"]) == 1


def test_engine_steps_beside_their_roofline(tmp_path: Path) -> None:
    budget = Budget(120)
    bench = Bench(CPU, True, Report("engine", tmp_path, CPU, budget), budget)
    bench.run(SMALL_MODEL, ["steps"])
    assert bench.finish() == 0
    modes = {row["mode"] for row in results(tmp_path)["rows"]}
    assert modes == {"prefill", "eager, depth 2", "graphs, depth 1", "graphs, depth 2", "graphs, depth 2, fp8"}


def test_loads_of_all_kinds_are_timed(tmp_path: Path) -> None:
    budget = Budget(60)
    assert (
        engine_loads.run(SMALL_MODEL, engine_loads.SMALL_PLAN, CPU, Report("loads", tmp_path, CPU, budget), budget) == 0
    )
    modes = [row["mode"].split()[0] for row in results(tmp_path)["rows"]]
    assert modes == ["decode,", "decode,", *2 * ["first", "beside", "mixed,"]]


def test_logits_that_differ_are_seen_until_tokens_do() -> None:
    tokens = np.array([[1, 5], [2, 6], [3, 7]])
    eager = Scores(tokens, np.array([[8.0, 4.0], [8.0, 4.0], [8.0, 4.0]]))
    other = Scores(np.array([[1, 5], [9, 6], [3, 7]]), np.array([[8.0, 4.0], [7.0, 4.0], [0.0, 4.0]]))
    assert eager.difference(other) == pytest.approx(1 / 8), "what follows another token is no longer the same text"
    assert eager.difference(Scores(tokens[:, :1], eager.logits[:, :1])) == 0


@pytest.mark.parametrize(
    ("model", "num_reqs", "milliseconds"),
    [
        ("llama-3.1-8b", 1, 3.52),
        ("llama-3.1-8b", 64, 5.49),
        ("llama-3.1-8b", 256, 12.85),  # bound by arithmetic
        ("qwen2.5-7b", 64, 4.16),
        ("qwen2.5-0.5b", 1, 0.233),  # tied embeddings: read as the output projection
    ],
)
def test_roofline(model: str, num_reqs: int, milliseconds: float) -> None:
    ceilings = Ceilings(copy=4.3e12, read=4.3e12, matmul=790e12)
    seconds = MODELS[model].roofline_seconds(ceilings, num_reqs, 1024, 2, 2)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_drafts_exact_and_timed(tmp_path: Path) -> None:
    report = Report("speculation", tmp_path, CPU, Budget(60))
    bench = speculation.Bench(CPU, speculation.SMALL_PLAN, 2, report)
    methods = ["ngram", "draft_model"]
    bench.check(methods)
    bench.run(SMALL_MODEL, methods)
    assert report.finish([]) == 0
    rows = results(tmp_path)["rows"]
    exact = {row["method"]: row["gained"] for row in rows if row["mode"] == "exactness"}
    assert list(exact) == methods and exact["draft_model"] > 1.5, "its drafts are right"
    steps = [(row["method"], row["batch"], row["drafts"]) for row in rows if row["mode"] == "step"]
    drafts = [(method, size, count) for method in methods for size in (1, 3) for count in (1, 2)]
    assert sorted(steps) == sorted([*drafts, ("plain", 1, 0), ("plain", 3, 0)])


def test_window_of_steady_decoding() -> None:
    """The window lasts from the last first token (t=2) to the first last one (t=5): 6 tokens in 3 s."""
    arrivals = Arrivals([[(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)], [(2, 1), (3, 1), (4, 2), (6, 1)]])
    assert arrivals.tokens_per_second == pytest.approx(6 / 3)
    assert arrivals.mean_tokens == pytest.approx((2 + 5) / 2 / 2 + (1 + 4) / 2 / 2)
    assert arrivals.gap(50) == 1.0


def test_streams_that_never_ran_together() -> None:
    with pytest.raises(LineError):
        _ = Arrivals([[(1, 1), (2, 1)], [(3, 1), (4, 1)]]).tokens_per_second


def test_a_check_times_nothing_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["kernels", "--only", "prefill", "--check", "--device", "cpu", "--small", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--part", "2/2"])
    assert kernels.main() == 0
    printed = capsys.readouterr().out
    assert "20 behind 30, 33: error" in printed and printed.count(": error") == 1  # of two cases the second
    monkeypatch.setattr(ops, "paged_attention", lambda query, *_: torch.zeros_like(query))
    assert kernels.main() == 1
    assert "WRONG: prefill" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "a/b"])
def test_parts_that_there_are_not_are_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", "--check", "--part", part])
    with pytest.raises(SystemExit):
        kernels.main()
