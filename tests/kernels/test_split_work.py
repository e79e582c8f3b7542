"""Work that is split among programs: on one stream, and as far as 32 bits reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.kernels.shapes import tuned_shapes
from benchmarks.kernels.slots import plan
from pagewire.kernels import tuning
from pagewire.kernels.triton.attention.split_cut import cut
from pagewire.kernels.triton.common import arrivals
from pagewire.kernels.triton.products import grouped_gemm, scaled_product

DEVICE = torch.device("cuda", 3)
MULTIPROCESSORS = 132
ZEROS = torch.zeros
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arrivals, "_counters", {})
    monkeypatch.setattr(arrivals, "_streams", {})
    yield


def on_stream(monkeypatch: pytest.MonkeyPatch, stream: int, *, capturing: bool = False) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: ZEROS(size, dtype=dtype))


def test_counters_serve_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    on_stream(monkeypatch, 0)
    counters = arrivals.arrival_counters(DEVICE, 10)
    on_stream(monkeypatch, 7, capturing=True)
    assert arrivals.arrival_counters(DEVICE, 10) is counters, "a replay is on the stream of the other launches"
    on_stream(monkeypatch, 7)
    with pytest.raises(RuntimeError, match="cuda:3 are launched on a second stream"):
        arrivals.arrival_counters(DEVICE, 10)
    assert arrivals.arrival_counters(torch.device("cuda", 4), 10) is not counters, "each device has its own"


def num_left() -> int:
    found = arrivals.num_left_counting()
    assert found is not None
    return int(found)


def test_counters_that_are_left_are_seen() -> None:
    assert arrivals.num_left_counting() is None
    small = arrivals.arrival_counters(CPU, 10)
    arrivals.arrival_counters(CPU, 1 << 17)
    assert num_left() == 0
    small[3] = 1  # captured graphs go on with an outgrown buffer
    assert num_left() == 1


@pytest.mark.parametrize(("groups", "rows", "pairs"), [(1 << 15, 1 << 16, False), (1 << 15, 1 << 15, True)])
def test_scales_beyond_32_bits_are_refused(groups: int, rows: int, pairs: bool) -> None:
    shape = (groups, rows, 2) if pairs else (groups, rows)
    with pytest.raises(AssertionError, match="2147483648 scales"):
        grouped_gemm.scales_of_kernels(torch.empty(shape, dtype=torch.float16, device="meta"))
    fewer = torch.empty(shape[0] - 1, *shape[1:], dtype=torch.float32, device="meta")
    assert grouped_gemm.scales_of_kernels(fewer) is fewer


def test_smoke_tests_of_attention_split_contexts() -> None:
    """Splits them on a GPU: or partial results, counters and the merge would not be tested there."""
    (shape,) = tuned_shapes("decode_attention", "tiny", 90)
    assert shape["context"] >= 2048 and shape["head_dim"] == 128
    config, batch, heads = tuning.lookup("decode_attention", 90, **shape), shape["batch"], 8
    slots = config["programs_per_sm"] * MULTIPROCESSORS
    lens = [shape["context"]] * batch
    made = cut(
        config["block_n"], slots, config["min_split"], shape["group"], heads, 128, shape["context"], batch, batch, 1, 0
    )
    assert all(item.splits > 1 for item in plan([1] * batch, lens, made, heads, config["block_n"]))


@pytest.mark.parametrize("kernel", ["int8_product", "fp8_weight_only", "fp8_product"])
def test_smoke_tests_of_scaled_products_split_inputs(kernel: str) -> None:
    (shape,) = tuned_shapes(kernel, "tiny", 90)
    config = tuning.lookup(kernel, 90, **shape)
    tiles, steps = -(-shape["outputs"] // config["block_n"]), -(-shape["inputs"] // config["block_k"])
    assert scaled_product._splits(tiles, steps, config["programs_per_sm"] * MULTIPROCESSORS)[0] > 1


@pytest.mark.parametrize("kernel", ["skinny_product", "grouped_skinny", "grouped_gemm"])
def test_smoke_tests_of_other_products_split_inputs(kernel: str) -> None:
    shape = tuned_shapes(kernel, "tiny", 90)[0]
    config = tuning.lookup(kernel, 90, **shape)
    steps = -(-shape["inputs"] // config.get("block_k", 128))
    tiles = -(-shape["outputs"] // config["block_n"])
    assert grouped_gemm.tiles_of_split(tiles, steps, MULTIPROCESSORS, config["programs_per_sm"]) < steps
