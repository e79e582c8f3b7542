"""CPU attention in C++: every way to cut a call into tiles gives the reference's result, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pagewire.kernels import reference
from tests.kernels.batches import Batch, make_batch
from tests.kernels.implementations import native

pytestmark = pytest.mark.pairs

TOLERANCE = 2e-2  # of bf16
# Decoding, the verification of drafted tokens, the longest query of few rows, prompts and chunks of them: most lengths
# are no multiple of any tile's.
QUERY_LENS = [1, 1, 2, 5, 0, 16, 17, 70, 1]
CONTEXT_LENS = [0, 300, 511, 128, 40, 15, 0, 229, 255]


@pytest.fixture
def set_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def mixed_batch(
    group: int = 3, head_dim: int = 64, block_size: int = 16, dtype: torch.dtype = torch.bfloat16, cache: str = ""
) -> Batch:
    return make_batch(
        QUERY_LENS,
        CONTEXT_LENS,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        cache=cache,
    )


def requests_of(batch: Batch) -> Iterator[tuple[slice, Batch]]:
    """Each request alone, and its tokens in the batch."""
    starts = batch.query_start_loc.tolist()
    for b, (start, end) in enumerate(pairwise(starts)):
        yield (
            slice(start, end),
            replace(
                batch,
                query=batch.query[start:end],
                block_table=batch.block_table[b : b + 1],
                query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=batch.seq_lens[b : b + 1],
                max_query_len=end - start,
            ),
        )


@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16, 20])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 16), (128, 32), (256, 16), (64, 8), (96, 48)])
def test_groups_and_head_dims(bf16_form: int, cache: str, group: int, head_dim: int, block_size: int) -> None:
    batch = mixed_batch(group, head_dim, block_size, cache=cache)
    actual = native.paged_attention(*batch.args())
    expected = reference.paged_attention(*batch.exact().args())
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.usefixtures("bf16_form")
@pytest.mark.parametrize("sliding_window", [0, 1, 33, 256, 400])
@pytest.mark.parametrize("chunks", [(613,), (256, 256, 101), (1, 15, 17, 300, 280), (600, 5, 4, 3, 1)], ids=str)
def test_chunks_of_a_prompt(chunks: tuple[int, ...], sliding_window: int) -> None:
    whole = make_batch([613], [0], num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    expected = reference.paged_attention(*whole.exact().args(sliding_window))
    begin = 0
    for size in chunks:
        chunk = replace(
            whole,
            query=whole.query[begin : begin + size],
            query_start_loc=torch.tensor([0, size], dtype=torch.int32),
            seq_lens=torch.tensor([begin + size], dtype=torch.int32),
            max_query_len=size,
        )
        actual = native.paged_attention(*chunk.args(sliding_window))
        torch.testing.assert_close(
            actual.float(), expected[begin : begin + size], atol=TOLERANCE, rtol=TOLERANCE, msg=f"tokens from {begin}"
        )
        begin += size


@pytest.mark.usefixtures("bf16_form")
@pytest.mark.parametrize("power", [-90, -70, 65, 80])
def test_keys_of_any_size(power: int) -> None:
    """Keys and queries of which squares are no floats, but products are."""
    batch = mixed_batch(head_dim=80)
    expected = reference.paged_attention(*batch.exact().args())
    batch.kv_cache[:, 0] *= 2.0**power
    actual = native.paged_attention(*replace(batch, query=batch.query * 2.0**-power).args())
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.usefixtures("bf16_form")
@pytest.mark.parametrize(
    ("where", "number"),
    [("query", float("nan")), ("key", float("nan")), ("value", float("nan")), ("value", float("inf"))],
)
@pytest.mark.parametrize("dim", [0, 37, 79])
def test_nan_shows_in_the_rows_that_see_it(where: str, number: float, dim: int) -> None:
    batch = make_batch([150], [20], num_heads=3, num_kv_heads=1, head_dim=80, block_size=16, dtype=torch.bfloat16)
    query, position = batch.query.clone(), 100
    if where == "query":
        query[position - 20, :, dim] = number
    else:
        block, offset = batch.block_table[0, position // 16], position % 16
        batch.kv_cache[block, int(where == "value"), 0, offset, dim] = number
    rows = native.paged_attention(*replace(batch, query=query).args()).isfinite().all(-1)
    last = position - 20 if where == "query" else 149
    assert not rows[position - 20 : last + 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sliding_window", [0, 50])
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.usefixtures("set_threads")
def test_bits_depend_neither_on_the_batch_nor_on_threads(
    dtype: torch.dtype, sliding_window: int, block_size: int
) -> None:
    batch = mixed_batch(dtype=dtype, block_size=block_size)
    torch.set_num_threads(1)
    together = native.paged_attention(*batch.args(sliding_window))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(native.paged_attention(*batch.args(sliding_window)), together)
        for tokens, alone in requests_of(batch):
            assert torch.equal(native.paged_attention(*alone.args(sliding_window)), together[tokens])


@pytest.mark.parametrize("context", [0, 250, 300])
def test_bits_in_fp32_do_not_depend_on_chunks(context: int) -> None:
    """A token that was decoded is computed again as part of a prompt when a request resumes."""
    whole = make_batch([40], [context], num_heads=3, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32)
    expected = native.paged_attention(*whole.args())
    for begin, size in ((0, 1), (7, 1), (8, 3), (20, 17), (39, 1)):
        chunk = replace(
            whole,
            query=whole.query[begin : begin + size],
            query_start_loc=torch.tensor([0, size], dtype=torch.int32),
            seq_lens=torch.tensor([context + begin + size], dtype=torch.int32),
            max_query_len=size,
        )
        assert torch.equal(native.paged_attention(*chunk.args()), expected[begin : begin + size])


@pytest.mark.usefixtures("set_threads")
def test_bits_of_a_long_prompt_do_not_depend_on_threads() -> None:
    batch = make_batch([700], [77], num_heads=3, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16)
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(native.paged_attention(*batch.args(300)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
