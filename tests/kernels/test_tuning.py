from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels import tuning
from pagewire.kernels.tuning import KERNELS, lookup

ARCHITECTURES = (80, 89, 90)
# No fp8 is multiplied on sm_80.
TABLES = [(k, sm) for k in KERNELS for sm in ARCHITECTURES if (k, sm) != ("fp8_product", 80)]
SHAPE = {"head_dim": 128, "kv_bytes": 2, "block_size": 16, "group": 4, "batch": 8, "query_len": 1}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory of tables in place of the real one."""
    caches = (tuning.lookup, tuning.load_table, tuning.table_architecture)
    monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
    for function in caches:
        function.cache_clear()
    yield tmp_path
    for function in caches:
        function.cache_clear()


def table(entries: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "kernel": "prefill_attention",
        "architecture": "sm_90",
        "provenance": {"measured": None},
        "entries": entries,
    } | fields


def entry(block_n: int = 32, **shape: int) -> dict[str, Any]:
    config = {
        "block_m": 64,
        "block_n": block_n,
        "descriptors": 0,
        "num_warps": 4,
        "num_stages": 2,
    }
    return {"shape": SHAPE | shape, "config": config}


def write(directory: Path, content: object, name: str = "sm_90/prefill_attention.json") -> None:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@given(st.sampled_from(TABLES), st.data())
def test_every_shape_has_a_complete_configuration(table: tuple[str, int], data: st.DataObject) -> None:
    kernel, architecture = table
    shape = data.draw(st.fixed_dictionaries({key: st.integers(1, 2**20) for key in KERNELS[kernel].shape}))
    config = lookup(kernel, architecture, **shape)
    assert set(config) == set(KERNELS[kernel].config)
    assert lookup(kernel, architecture, **dict(reversed(shape.items()))) == config


@given(st.sampled_from(TABLES), st.data())
def test_a_bound_matches_the_next_larger_listed_one(table: tuple[str, int], data: st.DataObject) -> None:
    kernel, architecture = table
    entries = tuning.load_table(kernel, architecture)
    target = data.draw(st.sampled_from(entries))
    assert lookup(kernel, architecture, **target.shape) == target.config
    keys = KERNELS[kernel]
    shape = dict(target.shape)
    for key in keys.bounds:  # below the bound, but above the next listed one
        smaller = [other.shape[key] for other in entries if other.shape[key] < shape[key]]
        shape[key] = data.draw(st.integers(max(smaller, default=0) + 1, shape[key]))
    assert lookup(kernel, architecture, **shape) == target.config


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True), st.integers(1, 5000))
def test_batch_matches_the_nearest_power(exponents: list[int], batch: int) -> None:
    rows = [tuning.Entry(SHAPE | {"batch": 2**e}, {"block_n": e}) for e in exponents]
    match = tuning.nearest(KERNELS["prefill_attention"], rows, SHAPE | {"batch": batch})
    best = min(abs(math.log2(batch) - e) for e in exponents)
    assert abs(math.log2(batch) - match.config["block_n"]) == pytest.approx(best)


def test_bounds_come_first_and_ties_go_to_the_larger_shape(directory: Path) -> None:
    entries = [entry(16, head_dim=64), entry(32, head_dim=128, batch=1), entry(64, head_dim=128, batch=64)]
    write(directory, table(entries))

    def block_n(**shape: int) -> int:
        return lookup("prefill_attention", 90, **SHAPE | shape)["block_n"]

    assert [block_n(head_dim=64), block_n(head_dim=65, batch=1), block_n(batch=8)] == [16, 32, 64]
    assert block_n(head_dim=256, batch=2) == 32  # none is as large: the largest


@pytest.mark.parametrize(
    ("device", "expected"),
    [(80, 80), (86, 89), (87, 80), (89, 89), (90, 90), (100, 90), (103, 90), (120, 89)],
)
def test_architecture_of_a_device(device: int, expected: int) -> None:
    assert tuning.table_architecture("decode_attention", device) == expected


def test_an_older_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8.0 or above, this one has 7.5"):
        lookup("decode_attention", 75, **SHAPE, context=4096)


def test_the_interpreter_counts_as_the_largest_architecture() -> None:
    assert tuning.capability_of(torch.device("cpu")) == 90


@pytest.mark.parametrize(
    ("kernel", "shape", "message"),
    [
        ("decoding", SHAPE, "no tuning table for a kernel 'decoding'; there are decode_attention"),
        ("decode_attention", {"head_dim": 64}, "is looked up with positive head_dim, kv_bytes"),
        ("decode_attention", SHAPE | {"size": 1}, "is looked up with positive head_dim, kv_bytes"),
        ("decode_attention", SHAPE | {"batch": 0}, "is looked up with positive head_dim, kv_bytes"),
    ],
)
def test_wrong_questions(kernel: str, shape: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lookup(kernel, 90, **shape)


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"kernel": "prefill_attention"',
        "[]",
        table([]),
        table([entry()], architecture="sm_80"),
        table([entry()], kernel="decode_attention"),
        {key: value for key, value in table([entry()]).items() if key != "entries"},
        table([entry()["shape"]]),
        table([entry() | {"shape": {"head_dim": 64}}]),
        table([entry() | {"config": entry()["config"] | {"num_stage": 3}}]),
        table([entry(block_n=48)]),
        table([entry(batch=0)]),
        table([entry(batch="8")]),  # type: ignore[arg-type]
        table([entry(), entry(block_n=64)]),
    ],
    ids=str,
)
def test_a_corrupt_table_names_its_file_and_the_remedy(directory: Path, content: object) -> None:
    write(directory, content)
    with pytest.raises(ValueError, match=r"sm_90/prefill_attention\.json cannot be used") as error:
        lookup("prefill_attention", 90, **SHAPE)
    assert "python -m benchmarks.kernels tune --kernel prefill_attention" in str(error.value)


@pytest.mark.parametrize(("kernel", "architecture"), TABLES)
def test_shipped_tables(kernel: str, architecture: int) -> None:
    """Each says where it comes from and holds what its kernel can run."""
    path = tuning.table_path(tuning.DIRECTORY, kernel, architecture)
    provenance = json.loads(path.read_text())["provenance"]
    measured = provenance["measured"]
    if measured is None:
        assert provenance["note"].startswith("not measured: ")
    else:
        assert {"device", "date", "command", "triton"} <= measured.keys()
    for row in tuning.load_table(kernel, architecture):
        assert row.config["num_warps"] in (1, 2, 4, 8, 16)
        assert row.config["block_n"] >= 16, "tl.dot takes no less"
        if kernel == "decode_attention" and row.shape["kv_bytes"] < 4:
            assert row.config["block_n"] >= 32, "on tensor cores every warp would compute all of 16"


def test_the_documentation_calls_no_table_measured_that_is_not() -> None:
    tables = [json.loads(tuning.table_path(tuning.DIRECTORY, *table).read_text()) for table in TABLES]
    page = (Path(__file__).parents[2] / "docs" / "design" / "kernels.md").read_text()
    measured = [table for table in tables if table["provenance"]["measured"] is not None]
    assert ("none was measured yet" in " ".join(page.split())) == (not measured)
