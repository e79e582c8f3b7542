"""Paged attention's Triton kernels against the reference, in Triton's interpreter on the CPU. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.attention [--sweep]

in a process of its own, because Triton reads the variable when a kernel is defined. fp32 and fp16 only: the
interpreter multiplies bf16 bit patterns. In every batch what no request owns is NaN, and block ids past a request's
length are garbage. With --sweep, random combinations instead (minutes).
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.triton.attention import decode_attention, paged_attention
from pagewire.kernels.triton.common import arrivals
from tests.kernels.batches import Batch, make_batch, one_layer_of_a_group
from tests.kernels.triton.interpreted import run_cases, some_of

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}


def check(actual: Tensor, batch: Batch, features: tuple[int, float] = (0, 0.0)) -> None:
    """The result against the truth in fp32, for the tokens of requests with a length; and all counters are zero."""
    expected = reference.paged_attention(*batch.exact().args(*features))
    query_lens = batch.query_start_loc.diff()
    alive = (batch.seq_lens > 0).repeat_interleave(query_lens)
    tolerance = TOLERANCES[batch.query.dtype]
    torch.testing.assert_close(actual.float()[alive], expected[alive], atol=tolerance, rtol=tolerance)
    for buffers in arrivals._counters.values():
        assert not any(buffer.any() for buffer in buffers), "arrival counters are not back at zero"


def case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    soft_cap: float = 0.0,
    cache: str = "",
    sinks: bool = False,
    split_size: int = 0,
    in_group: bool = False,
    aligned_table: bool = True,
) -> None:
    batch = make_batch(
        list(query_lens),
        list(context_lens),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        cache=cache,
        sinks=sinks,
        aligned_table=aligned_table,
    )
    if in_group:
        _, kv_cache, kv_scales = one_layer_of_a_group(batch.kv_cache, batch.kv_scales)
        batch = replace(batch, kv_cache=kv_cache, kv_scales=kv_scales)
    features = (window, soft_cap)
    given = batch.without_unseen_pages(window)
    check(paged_attention.paged_attention(*given.args(*features, split_size)), batch, features)


def split_on_the_device(min_split: int, num_programs: int) -> None:
    """Split counts that follow from all lengths, below and above the number of programs asked for."""
    batch = make_batch(
        [1, 3, 0, 1, 2], [300, 77, 0, 0, 150], num_heads=6, num_kv_heads=1, head_dim=16, block_size=16,
        dtype=torch.float32,
    )  # fmt: skip
    out = torch.full_like(batch.query, float("nan"))
    config = {"block_n": 32, "num_warps": 4, "num_stages": 2, "programs_per_sm": num_programs, "min_split": min_split}
    _, _, *tables, max_query_len, _, scale, window, soft_cap, scales, sinks, split_size, _, _ = batch.args()
    arguments: tuple[Any, ...] = (batch.query, batch.kv_cache, out, *tables, max_query_len, scale, window, soft_cap)
    arguments += (scales, sinks, split_size, config)
    decode_attention.decode_attention(*arguments)
    check(out, batch)


def far_blocks() -> None:
    """Blocks beyond 2^31 elements: a few small pages far apart in memory that is never touched between them."""
    batch = make_batch(
        [1, 20], [40, 30], num_heads=2, num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.float16, cache="fp8"
    )
    # The first request's first block becomes the last one of the pool.
    last, used = len(batch.kv_cache) - 1, int(batch.block_table[0, 0])
    order = torch.arange(last + 1)
    order[[last, used]] = order[[used, last]]
    named = batch.block_table <= last
    table = torch.where(named, order[batch.block_table.where(named, 0)].int(), batch.block_table)
    pages = batch.kv_cache.view(torch.uint8)[order]
    stride = -(-(2**31) // last // 16) * 16
    spread = torch.empty(stride * (last + 1), dtype=torch.uint8).as_strided(pages.shape, (stride, *pages.stride()[1:]))
    spread.copy_(pages)
    assert last * stride >= 2**31
    batch = replace(batch, kv_cache=spread.view(torch.float8_e4m3fn), block_table=table)
    check(paged_attention.paged_attention(*batch.args()), batch)


def padding() -> None:
    """Requests of length 0 that have tokens, as in a replayed graph; their block tables are garbage."""
    batch = make_batch(
        [1, 1, 20, 1, 1], [30, 0, 0, 60, 5], num_heads=4, num_kv_heads=2, head_dim=16, block_size=16,
        dtype=torch.float32,
    )  # fmt: skip
    dead = torch.tensor([False, True, True, False, True])
    table = batch.block_table.clone()
    table[dead] = 2**30
    batch = replace(batch, seq_lens=batch.seq_lens.masked_fill(dead, 0), block_table=table)
    check(paged_attention.paged_attention(*batch.args()), batch)


def longer_padding() -> None:
    """Drafts padded to a number of tokens: what has the padding has more of it than anybody may have drafts."""
    batch = make_batch(
        [4, 1, 2, 9], [30, 60, 5, 0], num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32
    )
    dead = torch.tensor([False, False, False, True])
    batch = replace(batch, seq_lens=batch.seq_lens.masked_fill(dead, 0), max_query_len=4)
    check(paged_attention.paged_attention(*batch.args()), batch)


def select(batch: Batch, requests: list[int]) -> tuple[Batch, list[Tensor]]:
    """The batch of these requests in this order, and the token indices of each in the batch they come from."""
    starts = batch.query_start_loc.tolist()
    tokens = [torch.arange(starts[b], starts[b + 1]) for b in requests]
    query_lens = [len(t) for t in tokens]
    return (
        replace(
            batch,
            query=batch.query[torch.cat(tokens)],
            block_table=batch.block_table[requests].contiguous(),
            query_start_loc=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
            seq_lens=batch.seq_lens[requests].contiguous(),
            max_query_len=max(query_lens),
        ),
        tokens,
    )


def independent_of_the_batch() -> None:
    """A fixed split gives every request the same bits alone, among others, and beside a prompt."""
    batch = make_batch(
        [1, 5, 40, 1, 16], [200, 90, 50, 20, 130], num_heads=6, num_kv_heads=2, head_dim=16, block_size=16,
        dtype=torch.float16,
    )  # fmt: skip
    together = paged_attention.paged_attention(*batch.args(split_size=64))
    check(together, batch)
    for requests in ([0], [1], [2], [4, 3], [3, 1, 0]):
        part, tokens = select(batch, requests)
        actual = paged_attention.paged_attention(*part.args(split_size=64))
        assert torch.equal(actual, together[torch.cat(tokens)]), f"requests {requests} differ from those in the batch"


MIXED = ([1, 0, 18, 3, 1], [70, 9, 20, 33, 0])

CASES: dict[str, Callable[[], None]] = {
    "decode": partial(case, [1, 1, 1], [0, 15, 70], (9, 3), 64),
    "decode fp16, pages of 32": partial(case, [1, 1], [33, 16], (8, 2), 64, 32, torch.float16),
    "prompts": partial(case, [17, 65], [0, 0], (3, 1)),
    "prompts longer than a tile, on a context": partial(case, [150, 17], [37, 64], (2, 1), 16, dtype=torch.float16),
    **some_of(
        {
            # None, one and several whole tiles of keys that every row sees.
            f"prompts on contexts, head_dim {head_dim}, pages of {block_size}": partial(
                case, [20, 17, 0], [330, 90, 9], (3, 1), head_dim, block_size, torch.float16, *features, sinks=sinks
            )
            for head_dim, block_size, features, sinks in (
                (64, 16, (0, 0.0), False),
                (96, 32, (300, 0.0), False),
                (128, 64, (0, 20.0), True),
                (192, 128, (90, 0.0), False),
                (256, 16, (260, 0.0), False),
            )
        }
    ),
    "prompts on contexts, by descriptors of one layer's pages": partial(
        case, [20, 17, 0], [330, 90, 9], (6, 2), 64, 64, torch.float16, in_group=True
    ),
    "mixed, empty requests": partial(case, *MIXED, (4, 4)),
    "padding": padding,
    **some_of(
        {
            f"group of {group}": partial(case, [1, 17, 3], [40, 30, 31], (group, 1))
            for group in (1, 2, 3, 5, 6, 7, 8, 12, 16, 20)
        }
    ),
    **some_of(
        {
            f"head_dim {head_dim}": partial(case, [1, 19], [40, 30], (2, 1), head_dim, 16, torch.float16)
            for head_dim in (8, 24, 64, 80, 96, 112, 128, 192, 256)
        }
    ),
    **some_of(
        {
            f"pages of {block_size}": partial(case, [1, 20, 2], [5, 280, 290], (2, 1), 16, block_size)
            for block_size in (8, 16, 32, 64, 128, 256)
        }
    ),
    **some_of(
        {
            f"a block table with rows anywhere, pages of {block_size}": partial(
                case, [1, 20, 2], [5, 280, 290], (2, 1), 16, block_size, aligned_table=False
            )
            for block_size in (16, 128)
        }
    ),
    "contexts that end with a page, a tile and a block table": partial(case, [1, 1, 2], [127, 63, 110], (4, 2)),
    "verification of 2 to 16 tokens": partial(case, [2, 3, 8, 16, 9], [50, 0, 16, 70, 31], (4, 2)),
    "verification in several tiles": partial(case, [16, 7], [40, 9], (8, 1)),
    **some_of(
        {
            f"verification, group of {group}, head_dim {head_dim}, cache {cache}, window {window}": partial(
                case,
                [16, 2, 9, 5],
                [40, 70, 3, 0],
                (group, 1),
                head_dim,
                dtype=torch.float16,
                cache=cache,
                window=window,
            )
            for group, head_dim, cache, window in (
                (1, 64, "", 0),
                (2, 128, "fp8", 0),
                (3, 80, "int8", 20),
                (4, 96, "fp8", 13),
                (6, 192, "", 0),
                (7, 256, "fp8", 30),
                (8, 64, "int8", 0),
                (12, 128, "", 9),
                (16, 256, "int8", 0),
            )
        }
    ),
    "verification, padding": longer_padding,
    "verification, window": partial(case, [16, 5], [90, 40], (6, 2), window=13),
    "window": partial(case, [1, 30, 1], [200, 60, 3], (3, 1), window=11),
    "window of one token": partial(case, [1, 20, 4], [50, 0, 20], (2, 1), window=1),
    "window, split": partial(case, [1, 4], [300, 250], (3, 1), window=150, split_size=32),
    "window, pages of 128": partial(case, [1, 20], [290, 250], (2, 1), block_size=128, window=150),
    "soft cap": partial(case, *MIXED, soft_cap=2.0),
    "soft cap, window, split": partial(case, [1, 20, 4], [90, 70, 60], (6, 2), window=50, soft_cap=3.0, split_size=32),
    "fp8": partial(case, *MIXED, (4, 2), 64, dtype=torch.float16, cache="fp8"),
    "fp8, split, odd head_dim, soft cap": partial(case, *MIXED, head_dim=80, soft_cap=4.0, cache="fp8", split_size=32),
    "int8": partial(case, *MIXED, (4, 2), 64, dtype=torch.float16, cache="int8"),
    "int8, fp32": partial(case, *MIXED, (4, 2), 16, cache="int8"),
    "int8, split, odd head_dim, soft cap": partial(
        case, *MIXED, head_dim=80, soft_cap=4.0, cache="int8", split_size=32
    ),
    "int8, prompts on contexts, one layer's pages of 64": partial(
        case, [20, 17, 0], [330, 90, 9], (6, 2), 64, 64, torch.float16, cache="int8", in_group=True
    ),
    "int8, window, sinks": partial(case, *MIXED, (4, 2), 96, window=30, sinks=True, cache="int8"),
    "sinks": partial(case, *MIXED, sinks=True),
    "sinks, split, window": partial(
        case, [1, 20, 4], [90, 70, 60], (6, 2), dtype=torch.float16, window=50, sinks=True, split_size=32
    ),
    "sinks, fp8, split": partial(case, [1, 2], [300, 65], (4, 1), 64, cache="fp8", sinks=True, split_size=32),
    "one layer of a group": partial(case, *MIXED, in_group=True),
    "one layer of a group, fp8, pages of 64": partial(
        case, *MIXED, (4, 2), 64, 64, torch.float16, cache="fp8", in_group=True
    ),
    "fixed split": partial(case, [1, 2, 16], [300, 65, 130], (4, 1), split_size=32),
    "fixed split, odd head_dim": partial(case, [1, 2], [100, 65], (4, 2), 96, split_size=32),
    "many splits of one request": partial(case, [1], [2500], (2, 1)),
    "splits, as many as programs": partial(split_on_the_device, 32, 8),
    "splits, more work than programs": partial(split_on_the_device, 32, 1),
    "splits, no shorter than the least": partial(split_on_the_device, 128, 64),
    "more requests than threads": partial(case, [*[0] * 64, 20, *[0] * 64, 1], [3] * 130, (1, 1)),
    "blocks beyond 2^31 elements": far_blocks,
    "fixed split is independent of the batch": independent_of_the_batch,
}


def sweep_case(seed: int) -> None:
    """Any combination of everything."""
    choose = random.Random(seed)
    num_reqs = choose.randint(1, 6)
    query_lens = [choose.choice([0, 1, 1, 1, choose.randint(2, 16), choose.randint(17, 150)]) for _ in range(num_reqs)]
    query_lens[0] += not any(query_lens)
    context_lens = [choose.choice([0, choose.randint(1, 40), choose.randint(1, 600)]) for _ in query_lens]
    num_kv_heads = choose.choice([1, 2, 3])
    case(
        query_lens,
        context_lens,
        (num_kv_heads * choose.randint(1, 16), num_kv_heads),
        choose.choice([16, 64, 80, 96, 128, 192, 256]),
        choose.choice([8, 16, 32, 64, 128, 256]),
        choose.choice([torch.float16, torch.float32]),
        choose.choice([0, 0, choose.randint(1, 300)]),
        choose.choice([0.0, 0.0, 5.0]),
        choose.choice(["", "", "fp8", "int8"]),
        choose.choice([False, True]),
        choose.choice([0, 0, 16, 64, 256]),
        aligned_table=choose.choice([False, True]),
    )


SWEEP = {f"sweep {seed}": partial(sweep_case, seed) for seed in range(150)}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, SWEEP))
