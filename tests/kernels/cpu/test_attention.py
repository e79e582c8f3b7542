"""CPU attention, C++ and plain torch, against the reference."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import reference
from tests.kernels.batches import GARBAGE_BLOCK_ID, Batch, far_into_a_group, make_batch, one_layer_of_a_group
from tests.kernels.implementations import fallback, native
from tests.sweep import examples

pytestmark = pytest.mark.pairs

TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

implementations = pytest.mark.parametrize(
    "cpu", [native, fallback], ids=lambda module: module.__name__.rpartition(".")[2]
)


def assert_matches_reference(
    cpu: ModuleType,
    batch: Batch,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    actual = cpu.paged_attention(*batch.without_unseen_pages(sliding_window).args(sliding_window, soft_cap))
    expected = reference.paged_attention(*batch.exact().args(sliding_window, soft_cap))
    tolerance = TOLERANCES[batch.query.dtype]
    assert actual.dtype == batch.query.dtype
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


# (query_lens, context_lens): decode only, prefill only, both with empty requests, a long context
MIXES = [
    ([1, 1, 1], [0, 31, 700]),
    ([7, 33], [0, 0]),
    ([0, 1, 7, 33, 200, 0], [0, 90, 5, 40, 100, 12]),
    ([1, 2], [1500, 1023]),
]


@pytest.mark.parametrize("cpu", [native, fallback], ids=lambda module: module.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", range(len(MIXES)))
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (2, 2, 128, 32), (8, 2, 80, 8), (8, 1, 64, 16), (2, 1, 256, 16), (2, 2, 72, 5)],
)
def test_ragged_mixes(
    cpu: ModuleType,
    dtype: torch.dtype,
    mix: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    batch = make_batch(
        *MIXES[mix],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    assert_matches_reference(cpu, batch)


@pytest.mark.parametrize("cpu", [native, fallback], ids=lambda module: module.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sliding_window", [0, 1, 20, 300])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0, 50.0])
def test_window_and_soft_cap(cpu: ModuleType, dtype: torch.dtype, sliding_window: int, soft_cap: float) -> None:
    batch = make_batch(
        [1, 40, 3, 1],
        [600, 0, 30, 2],
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=dtype,
    )
    assert_matches_reference(cpu, batch, sliding_window, soft_cap)


@pytest.mark.parametrize("cpu", [native, fallback], ids=lambda module: module.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", [2, 3])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (2, 1, 72, 5), (4, 4, 128, 32)]
)
@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_pages_with_scales(
    cpu: ModuleType,
    dtype: torch.dtype,
    mix: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache: str,
) -> None:
    batch = make_batch(
        *MIXES[mix],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        cache=cache,
    )
    assert_matches_reference(cpu, batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_fp8_value_is_read_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    kv_cache = torch.zeros(256, 2, 1, 16, 8, dtype=torch.uint8)
    kv_cache[:, 1, :, 0] = codes[:, None, None]
    kv_cache = kv_cache.view(torch.float8_e4m3fn)
    # A request per code: with one key its output is that key's value.
    output = native.paged_attention(
        torch.ones(256, 1, 8, dtype=dtype),
        kv_cache,
        torch.arange(256, dtype=torch.int32)[:, None],
        torch.arange(257, dtype=torch.int32),
        torch.ones(256, dtype=torch.int32),
        1,
        1,
        1.0,
        0,
        0.0,
        torch.ones(2, 1),
        None,
        0,
        None,
    )
    expected = codes.view(torch.float8_e4m3fn).float()[:, None, None].expand(256, 1, 8)
    assert torch.equal(output.float().nan_to_num(1000), expected.nan_to_num(1000))


@settings(max_examples=examples(40), deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 400)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    head_dim=st.integers(1, 16).map(lambda n: 8 * n),
    block_size=st.sampled_from([1, 8, 16, 24, 64]),
    sliding_window=st.sampled_from([0, 0, 7, 100]),
    dtype=st.sampled_from(DTYPES),
    cache=st.sampled_from(["", "fp8", "int8"]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    requests: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    sliding_window: int,
    dtype: torch.dtype,
    cache: str,
    sinks: bool,
    seed: int,
) -> None:
    batch = make_batch(
        [q for q, _ in requests],
        [c for _, c in requests],
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
        cache=cache,
        sinks=sinks,
    )
    assert_matches_reference(native, batch, sliding_window)


@implementations
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("cache", "window"), [("", 0), ("", 20), ("fp8", 0), ("int8", 20)])
def test_sinks_take_their_share_once(cpu: ModuleType, dtype: torch.dtype, cache: str, window: int) -> None:
    """Returns whether a context is one range of keys or several; a sink may outweigh all keys, or none."""
    batch = make_batch(
        [1, 40, 3, 1], [900, 0, 30, 2], num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype,
        cache=cache, sinks=True,
    )  # fmt: skip
    assert_matches_reference(cpu, batch, window)
    batch = replace(batch, sinks=torch.tensor([200.0, -200.0, 90.0, -90.0, 0.0, float("-inf")]))
    assert_matches_reference(cpu, batch, window)


@pytest.mark.parametrize("cpu", [native, fallback, reference])
@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
def test_pages_that_left_the_window_are_not_read(cpu: ModuleType, cache: str) -> None:
    """Neither their ids, which are stale, nor what others have written to them since."""
    batch = make_batch(
        [1, 10], [200, 150], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32, cache=cache
    )
    window = 40
    expected = cpu.paged_attention(*batch.args(window))
    for b, first_seen in enumerate([200 - window + 1, 150 - window + 1]):
        for page in range(first_seen // 16):
            if cache == "int8" and batch.kv_scales is not None:
                batch.kv_scales[batch.block_table[b, page]] = float("nan")
            else:
                batch.kv_cache[batch.block_table[b, page]] = float("nan")
    assert torch.equal(cpu.paged_attention(*batch.args(window)), expected)
    assert torch.equal(cpu.paged_attention(*batch.without_unseen_pages(window).args(window)), expected)


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    alone = make_batch([1], [900], num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
    prompt = make_batch(
        [64], [0], num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16, seed=1
    )
    offset = alone.kv_cache.shape[0]
    both = Batch(
        query=torch.cat([alone.query, prompt.query]),
        kv_cache=torch.cat([alone.kv_cache, prompt.kv_cache]),
        block_table=torch.cat(
            [
                alone.block_table,
                torch.nn.functional.pad(
                    prompt.block_table + offset,
                    (0, alone.block_table.shape[1] - prompt.block_table.shape[1]),
                ),
            ]
        ),
        query_start_loc=torch.tensor([0, 1, 65], dtype=torch.int32),
        seq_lens=torch.cat([alone.seq_lens, prompt.seq_lens]),
        max_query_len=64,
        scale=alone.scale,
    )
    together = native.paged_attention(*both.args())
    assert torch.equal(together[:1], native.paged_attention(*alone.args()))
    assert torch.equal(together[1:], native.paged_attention(*prompt.args()))


def test_thread_count_does_not_change_the_result() -> None:
    batch = make_batch(
        [1, 90], [1200, 0], num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16
    )
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(native.paged_attention(*batch.args()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_large_scores_neither_overflow_nor_lose_the_maximum() -> None:
    batch = make_batch([1, 20], [300, 0], num_heads=3, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32)
    batch.query.mul_(100.0)
    assert_matches_reference(native, batch)


def test_padding_requests_are_harmless() -> None:
    batch = make_batch([2, 1], [3, 40], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    expected = native.paged_attention(*batch.args())
    padded = Batch(
        query=batch.query,
        kv_cache=batch.kv_cache,
        block_table=torch.cat([batch.block_table, torch.full_like(batch.block_table, 2**30)]),
        query_start_loc=torch.tensor([0, 2, 3, 3, 3], dtype=torch.int32),
        seq_lens=torch.tensor([5, 41, 0, 0], dtype=torch.int32),
        max_query_len=2,
        scale=batch.scale,
    )
    for cpu in (native, fallback):
        torch.testing.assert_close(cpu.paged_attention(*padded.args()), expected)


@pytest.mark.parametrize("attention", [native, fallback, reference], ids=lambda module: module.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_one_layer_of_a_group_is_read_as_a_cache_of_its_own(
    bf16_form: int, attention: ModuleType, dtype: torch.dtype, cache: str, head_dim: int
) -> None:
    batch = make_batch(
        [1, 40, 3, 17],
        [600, 0, 130, 300],
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        cache=cache,
    )
    _, view, scales = one_layer_of_a_group(batch.kv_cache, batch.kv_scales)
    assert not view.is_contiguous()
    for window in (0, 50):
        expected = attention.paged_attention(*batch.args(window))
        assert torch.equal(
            attention.paged_attention(*replace(batch, kv_cache=view, kv_scales=scales).args(window)), expected
        )


@pytest.mark.usefixtures("bf16_form")
@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
def test_block_ids_beyond_32_bit_offsets(cache: str) -> None:
    batch = make_batch(
        [1, 30], [40, 17], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16, cache=cache
    )
    huge, scales, shift = far_into_a_group(batch.kv_cache, batch.kv_scales)
    table = torch.where(batch.block_table == GARBAGE_BLOCK_ID, batch.block_table, batch.block_table + shift)
    far = replace(batch, kv_cache=huge, kv_scales=scales, block_table=table)
    assert torch.equal(native.paged_attention(*far.args()), native.paged_attention(*batch.args()))


def test_wrong_arguments_are_named() -> None:
    batch = make_batch([1], [20], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="3 heads cannot share 2 KV heads"):
        native.paged_attention(*replace(batch, query=batch.query[:, :3]).args())
    with pytest.raises(TypeError, match="int32"):
        native.paged_attention(*replace(batch, block_table=batch.block_table.long()).args())
    with pytest.raises(ValueError, match="page of kv_cache must be contiguous"):
        native.paged_attention(*replace(batch, kv_cache=batch.kv_cache.transpose(2, 3)).args())
    with pytest.raises(TypeError, match="float64"):
        double = replace(batch, query=batch.query.double(), kv_cache=batch.kv_cache.double())
        native.paged_attention(*double.args())
    with pytest.raises(TypeError, match="without kv_scales"):
        native.paged_attention(*replace(batch, kv_cache=batch.kv_cache.to(torch.float8_e4m3fn)).args())
    with pytest.raises(TypeError, match="with kv_scales"):
        native.paged_attention(*replace(batch, kv_scales=torch.ones(2, 2)).args())
    with pytest.raises(ValueError, match=r"\[2, 2\]"):
        fp8 = replace(batch, kv_cache=batch.kv_cache.to(torch.float8_e4m3fn), kv_scales=torch.ones(2))
        native.paged_attention(*fp8.args())
