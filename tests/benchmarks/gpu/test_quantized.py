"""The GPU benchmark of products with quantized weights, proven on the CPU with tiny shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import compile_ahead, quantized
from benchmarks.gpu.cases import product_cases
from benchmarks.gpu.cases.case import OURS, Case, Contestant
from benchmarks.gpu.cases.product_cases import SHAPES, Series, cases, dense_targets, series
from benchmarks.gpu.cases.product_inputs import Fp8, Grouped, Int8, Weights
from benchmarks.gpu.engine.models import MODELS, SMALL_INT4_MODEL, SMALL_MODEL
from benchmarks.gpu.engine.steps import Decoded
from benchmarks.gpu.engine.table import EngineTable
from benchmarks.gpu.measure import Ceilings
from benchmarks.gpu.peer_kernels import checkpoint_product
from benchmarks.gpu.peer_kernels import files as peer_files
from benchmarks.gpu.peer_kernels import products as peer_products
from benchmarks.gpu.quantized import ProductTable
from benchmarks.gpu.report import Budget, Report
from benchmarks.gpu.table import Measured
from pagewire.services.executor.loading.quantization.awq import GemmFormat

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy=4.3e12, read=4.3e12, matmul=790e12)


def results(directory: Path) -> dict[str, Any]:
    (path,) = directory.iterdir()
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_every_product_right_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantized.run(product_cases.GROUPS, CPU, True, tmp_path, Budget(math.inf)) == 0
    rows = results(tmp_path)["rows"]
    assert {(row["group"], row["series"]) for row in rows} == {
        (one.group, one.name) for one in series(product_cases.GROUPS, small=False)
    }
    assert all(row["times_us"][OURS] > 0 and "torch (nk)" in row["times_us"] for row in rows)
    assert "w4a16 M=1 to 64: no time of marlin" in capsys.readouterr().out


def test_compiling_ahead_calls_every_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def peer(weights: Weights, x: torch.Tensor, expected: object) -> dict[str, Contestant]:
        return {"peer": Contestant([lambda: called.append(f"{weights} M={len(x)}")], None)}

    monkeypatch.setattr(product_cases, "PEERS", {"int_mm": peer})
    monkeypatch.setattr(product_cases, "_ON_CPU", ("int_mm",))
    for part in range(2):
        compile_ahead.compile_part(part, 2, ["int8"], small=True)
    assert called == ["128x256 M=1", "128x256 M=17"]


def test_what_no_time_is_left_for_is_named_once_a_shape(tmp_path: Path) -> None:
    assert quantized.run(["int8"], CPU, True, tmp_path, Budget(0)) == 0
    assert results(tmp_path)["left_out"] == ["int8: channels 128x256 M=1 and larger batches"]


def test_wrong_peers_are_named_and_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses, one that is wrong, and one that is right."""

    def peer(error: float) -> Callable[..., dict[str, Contestant]]:
        return lambda weights, x, expected: {f"peer {error}": Contestant([lambda: None], lambda: error)}

    def refusing(*_: object) -> dict[str, Contestant]:
        raise peer_files.PeerMissingError("not there")

    names = ("refusing", "wrong", "right")
    peers = dict(zip(names, (refusing, peer(0.5), peer(0.0)), strict=True))
    monkeypatch.setattr(product_cases, "PEERS", peers)
    monkeypatch.setattr(product_cases, "_ON_CPU", names)
    one = Series("int8", "channels", Int8(), names, [(64, 64)], [1])
    report = Report("quantized", tmp_path, CPU, Budget(60))
    table = ProductTable(report, CEILINGS, True, ())
    for case in cases(one, (64, 64), CPU):
        table.add(case, CPU)
    (row,) = results(tmp_path)["rows"]
    assert set(row["times_us"]) == {OURS, "peer 0.0"}
    assert any("not there" in note for note in row["notes"]) and any("error 0.5" in note for note in row["notes"])


@pytest.mark.parametrize(
    ("shape", "num_tokens", "expected"),
    [
        ((28672, 4096), 1, {("ratio", 2.2, 3.0), ("fraction", 0.55, 0.75)}),
        ((28672, 4096), 2, {("fraction", 0.55, 0.75)}),
        ((28672, 4096), 64, {("ratio", 1.3, 1.8)}),
        ((4096, 14336), 8, {("ratio", 2.1, 2.8)}),  # 30.5 MB
        ((4096, 4096), 8, {("ratio", 1.5, None)}),
        ((4096, 4096), 4096, {("ratio", 0.8, None)}),
        ((37888, 3584), 512, {("ratio", 0.85, 0.95), ("ratio", 1.0, None)}),
    ],
)
def test_targets(shape: tuple[int, int], num_tokens: int, expected: set[tuple[str, float, float | None]]) -> None:
    assert {(t.unit, t.must, t.stretch) for t in dense_targets(Grouped(), shape, num_tokens)} == expected


def test_floor_of_few_tokens_is_the_weights_bytes() -> None:
    """The floor is 14.2 us for 28672 x 4096 in 4.156 bits at 4.3 TB/s."""
    case = next(_cases(series(["w4a16"], small=False)[0], SHAPES[0]))
    assert CEILINGS.floor_seconds(case.num_bytes, case.num_flops, case.rate) * 1e6 == pytest.approx(14.2, abs=0.1)


def _cases(one: Series, shape: tuple[int, int]) -> Iterator[Case]:
    return cases(one, shape, CPU)


def measured(num_tokens: int, **times: float) -> Measured:
    facts = {"series": "awq", "shape": "1x1", "num_tokens": num_tokens}
    return Measured("w4a16", f"M={num_tokens}", facts, 1.0, {OURS: 2.0, **times}, {"ratio torch": "MISS"})


def test_means_of_peers_and_the_closing_table(tmp_path: Path) -> None:
    table = ProductTable(Report("quantized", tmp_path, CPU, Budget(60)), CEILINGS, True, product_cases.MEAN_TARGETS)
    table.measured = [
        measured(1, marlin=2.0, **{"torch (nk)": 5.0, "torch (kn)": 4.0}),
        measured(16, marlin=4.0, gemlite=3.0),
        measured(512, marlin=0.2, machete=1.6),
    ]
    lines = table.summary()
    assert f"w4a16 M=1 to 64: marlin's time / ours, geometric mean of 2: {math.sqrt(2):.3f}, stretch" in lines[1]
    assert any("M=64 to 4096: machete's time / ours, geometric mean of 1: 0.800, MISS" in line for line in lines)
    assert any("M=2 to 64: gemlite's time / ours, geometric mean of 1: 1.500, pass" in line for line in lines)
    assert "w4a16 M=1: no time of gemlite" in lines
    assert lines[-1].split() == ["1x1", "2.00!", ".50", "-", ".50", "-", ".50"]


@pytest.mark.parametrize("bits_per_weight", [4 + 20 / 128, 8 + 16 / 64, 4 + 32 / 32])
def test_bytes_of_grouped_weights(bits_per_weight: float) -> None:
    forms = {4 + 20 / 128: Grouped(), 8 + 16 / 64: Grouped(8, 64, "symmetric"), 5.0: Grouped(4, 32, "minimums")}
    assert forms[bits_per_weight].num_bytes(256, 512) == 256 * 512 * bits_per_weight / 8


@pytest.mark.parametrize("form", [Fp8(False), Fp8(True), Int8()])
def test_bytes_of_weights_of_one_byte(form: Fp8 | Int8) -> None:
    weight = form.random(256, 384, CPU)
    assert form.num_bytes(256, 384) == weight.weight.nbytes + weight.scales.nbytes


def test_scales_are_the_same_in_both_16_bit_types() -> None:
    scales = Grouped().random(64, 256, CPU).scales
    assert torch.equal(scales.bfloat16().float(), scales.float())


def test_checkpoint_layout_is_autoawqs() -> None:
    weight = Grouped().random(64, 256, CPU)
    qweight, qzeros, scales = checkpoint_product.awq_layout(weight)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    assert torch.equal(GemmFormat(128, True).read(tensors, 64, 256).dequantize(), weight.dequantize())


def test_words_hold_the_first_code_lowest() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    assert [f"{word & 0xFFFFFFFF:08x}" for word in peer_products._words(codes, 4).flatten().tolist()] == [
        "76543210",
        "fedcba98",
    ]


def test_marlin_scales_and_zeros_are_permuted_by_64_columns() -> None:
    columns = torch.arange(64).repeat(2, 1)
    assert peer_products.marlin_scales(columns)[0, :9].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1]
    # Of a word's eight zero points those with even numbers come first.
    word = int(peer_products.marlin_zeros((columns // 8).to(torch.uint8), 4)[0, 0]) & 0xFFFFFFFF
    assert f"{word:08x}" == "75316420"


def test_missing_peers_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_files, "PEERS", tmp_path)
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    weights = Weights(Grouped(), 64, 128, torch.bfloat16, CPU)
    for peer in (peer_products.marlin, peer_products.machete, peer_products.gemlite):
        with pytest.raises(peer_files.PeerMissingError, match=r"peer_kernels\.fetch"):
            peer(weights, x, [x])


def test_int4_roofline() -> None:
    """The roofline counts 4.68 GB of 4.156 bits in layers, the output projection in 16."""
    model = MODELS["llama-3.1-8b-int4"]
    assert model.weight_bytes(2) / 1e9 == pytest.approx(4.68, abs=0.02)
    assert model.roofline_seconds(CEILINGS, 1, 1024, 2, 2) * 1e3 == pytest.approx(1.12, abs=0.01)


def test_int4_beside_16_bits(tmp_path: Path) -> None:
    table = EngineTable(Report("engine", tmp_path, CPU, Budget(60)), CEILINGS, 2, judge=True)
    dense, int4 = MODELS["llama-3.1-8b"], MODELS["llama-3.1-8b-int4"]
    slow = Decoded(1, 1024.0, 4e-3, [4e-3], torch.zeros(1, 1).numpy())
    fast = replace(slow, step_seconds=2e-3)
    assert "over 16 bits" not in table.judge_step(int4, fast, fast, None)  # there is nothing to compare with
    table.judge_step(dense, slow, slow, None)
    assert "over 16 bits 2.00:pass" in table.judge_step(int4, fast, fast, None)
    assert SMALL_INT4_MODEL.dense == SMALL_MODEL.name
